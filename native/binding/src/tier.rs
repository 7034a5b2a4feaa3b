//! Messages that are uploaded to the tier.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use trimq_native_core::tier::upload;

use crate::buffers::{Source, Target};
use crate::entries::bytes_of;
use crate::guarded;

type Made<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>, i64, i64, [Bound<'py, PyBytes>; 4]);

/// Copy the records of ``units`` into ``target`` as they stand in the tier, the first at ``position``.
///
/// ``log``: complete records of the log, from log offset ``start`` on. ``target``: memory of their size that nothing else uses.
/// Returns units, entries of the side file, the smallest and largest store time, and with a ``topic`` hash, position,
/// size and store time of each key, as bytes in native byte order; None for anything unusual.
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
    topic: Option<&str>,
) -> PyResult<Option<Made<'py>>> {
    guarded(|| {
        let log = Source::<u8>::of(log)?;
        let mut target = Target::of(target, &[log.place()])?;
        let (log, units, target) = (log.slice(), units.as_bytes(), target.slice());
        let made = py.detach(|| upload(log, start, units, position, target, topic));
        Ok(made.map(|made| {
            let columns = [
                bytes_of(py, &made.hashes),
                bytes_of(py, &made.positions),
                bytes_of(py, &made.sizes),
                bytes_of(py, &made.times),
            ];
            (PyBytes::new(py, &made.units), PyBytes::new(py, &made.entries), made.begin, made.end, columns)
        }))
    })
}
