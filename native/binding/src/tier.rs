//! Messages that are uploaded to the tier, and the items of its index.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use trimq_native_core::heads::Place;
use trimq_native_core::tier::{can_restore, restore, upload, Queue};
use trimq_native_core::tier_index::put;

use crate::buffers::{Source, Target};
use crate::{fault, guarded};

type Bytes<'py> = Bound<'py, PyBytes>;
type Made<'py> = (Bytes<'py>, Bytes<'py>, i64, i64, Bytes<'py>, Bytes<'py>);

/// Copy the records of ``units`` into ``target`` as they stand in the tier, the first at ``position``.
///
/// With a negative ``position`` they keep the offsets that they have in the log.
///
/// ``log``: complete records of the log, from log offset ``start`` on. ``target``: memory of their size that nothing else uses.
/// Returns units, entries of the side file, the smallest and largest store time, and with a ``queue`` (topic, topic id,
/// queue id) an item for each key, without seconds and link, and its store time in native byte order. None for anything
/// unusual.
///
/// Called in a thread: the interpreter is released meanwhile.
#[pyfunction]
pub fn tier_batch<'py>(
    py: Python<'py>,
    log: &Bound<'py, PyAny>,
    start: i64,
    units: &Bound<'py, PyBytes>,
    position: i64,
    target: &Bound<'py, PyAny>,
    queue: Option<(String, i32, i32)>,
) -> PyResult<Option<Made<'py>>> {
    guarded(|| {
        let log = Source::<u8>::of(log)?;
        let mut target = Target::of(target, &[log.place()])?;
        let (log, units, target) = (log.slice(), units.as_bytes(), target.slice());
        let queue = queue.as_ref().map(|(topic, topic_id, queue_id)| Queue { topic, ids: (*topic_id, *queue_id) });
        let made = py.detach(|| upload(log, start, units, position, target, queue));
        Ok(made.map(|made| {
            let bytes = |bytes: &[u8]| PyBytes::new(py, bytes);
            (bytes(&made.units), bytes(&made.entries), made.begin, made.end, bytes(&made.items), bytes(&made.times))
        }))
    })
}

/// The records of ``units``, as the tier has them, with their offsets in the log, which ``entries`` of the side file hold.
///
/// ``stored`` begins at stream position ``start``; ``offset`` is the queue offset of the first. ``place``: queue id, magic,
/// topic with its length. ``unknown`` is added to the position of a record whose entry belongs to another one. None
/// unless all are ordinary.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // as heads.are_messages, and the entries
pub fn tier_records<'py>(
    py: Python<'py>,
    stored: &Bound<'py, PyAny>,
    start: i64,
    units: &Bound<'py, PyBytes>,
    entries: &Bound<'py, PyBytes>,
    offset: i64,
    place: (i32, u32, &[u8]),
    unknown: i64,
) -> PyResult<Option<Bytes<'py>>> {
    guarded(|| {
        let stored = Source::<u8>::of(stored)?;
        let (queue_id, magic, topic) = place;
        let place = Place { queue_id, magic, topic };
        let (stored, units, entries) = (stored.slice(), units.as_bytes(), entries.as_bytes());
        if !can_restore(stored, start, units, entries, offset, &place, unknown) {
            return Ok(None);
        }
        let records = PyBytes::new_with(py, stored.len(), |records| {
            records.copy_from_slice(stored);
            restore(records, start, units, entries, unknown);
            Ok(())
        })?;
        Ok(Some(records))
    })
}

/// Write items behind the ``count`` ones of a local index file that began at ``begin`` (ms), with their seconds and links.
///
/// ``items`` are bytes as tier_batch makes them, ``times`` their store times in ms. Returns how many slots were empty
/// before.
#[pyfunction]
pub fn put_tier_items(
    file: &Bound<'_, PyAny>,
    slots: usize,
    count: u32,
    items: &Bound<'_, PyAny>,
    begin: i64,
    times: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    guarded(|| {
        let (items, times) = (Source::<u8>::of(items)?, Source::<i64>::of(times)?);
        let mut file = Target::of(file, &[items.place(), times.place()])?;
        put(file.slice(), slots, count, items.slice(), begin, times.slice())
            .ok_or_else(|| fault("the items do not fit into the file"))
    })
}
