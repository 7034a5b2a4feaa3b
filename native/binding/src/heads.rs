//! Records that a queue's units refer to.

use pyo3::prelude::*;
use trimq_native_core::heads::{are_messages as are, Place};

use crate::buffers::Source;
use crate::guarded;

/// Whether each of ``units`` refers to the message of its queue offset; that of the first unit is ``offset``.
///
/// ``records``: the part of the log from log offset ``start`` on. ``place``: queue id, magic, topic with its length.
#[pyfunction]
pub fn are_messages(
    records: &Bound<'_, PyAny>,
    start: i64,
    units: &Bound<'_, PyAny>,
    offset: i64,
    place: (i32, u32, &[u8]),
) -> PyResult<bool> {
    guarded(|| {
        let (records, units) = (Source::<u8>::of(records)?, Source::<u8>::of(units)?);
        let (queue_id, magic, topic) = place;
        Ok(are(records.slice(), start, units.slice(), offset, &Place { queue_id, magic, topic }))
    })
}
