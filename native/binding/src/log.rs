//! Records of the log, as a slave gets them and as the dispatch reads them.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use trimq_native_core::log::{check, dispatch, Checked};

use crate::buffers::Source;
use crate::entries::Keys;
use crate::guarded;

type Rows<'py> = (usize, i64, Vec<i64>, Vec<(String, i32, i64, usize)>, Bound<'py, PyBytes>, Vec<Keys>);

/// Check the ordinary records at the start of ``data``, which is at log offset ``physical``.
///
/// ``room``: the bytes from there to the end of the file. Returns the size of the records, and the last one's store time.
#[pyfunction]
pub fn log_check(data: &Bound<'_, PyAny>, physical: i64, room: usize) -> PyResult<(usize, i64)> {
    guarded(|| {
        let Checked { size, stored } = check(Source::<u8>::of(data)?.slice(), physical, room);
        Ok((size, stored))
    })
}

/// Units and keys of the ordinary records at the start of ``data``, which is at log offset ``physical``.
///
/// With ``tags``, tags are keys too. Topics in ``without`` are left to Python. Returns the records' size, the last one's
/// store time, the log offset of each; (topic, queue id, queue offset of the first, number) of each queue, the units by
/// queue; the keys.
#[pyfunction]
pub fn log_rows<'py>(
    py: Python<'py>,
    data: &Bound<'py, PyAny>,
    physical: i64,
    tags: bool,
    without: Vec<String>,
) -> PyResult<Rows<'py>> {
    guarded(|| {
        let data = Source::<u8>::of(data)?;
        let made = dispatch(data.slice(), physical, tags, &without);
        let mut units = Vec::new();
        let mut queues = Vec::with_capacity(made.queues.len());
        for queue in &made.queues {
            queues.push((
                queue.topic.to_owned(),
                queue.id,
                queue.start,
                queue.units.len() / trimq_native_core::rows::UNIT,
            ));
            units.extend_from_slice(&queue.units);
        }
        let keys = made.keys.into_iter();
        let keys = keys.map(|run| Keys { hashes: run.hashes, physical: run.physical, store_timestamp: run.stored });
        let Checked { size, stored } = made.checked;
        Ok((size, stored, made.offsets, queues, PyBytes::new(py, &units), keys.collect()))
    })
}
