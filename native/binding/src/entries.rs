//! Keys of messages, and the entries of index files made from them.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyTuple};
use trimq_native_core::hash::Hash;
use trimq_native_core::index::{put, seconds_since, Entry};

use crate::buffers::{Source, Target};
use crate::{fault, guarded};

/// Hashed keys of messages with the same store timestamp.
#[pyclass(frozen)]
pub struct Keys {
    pub hashes: Vec<i32>,
    pub physical: Vec<i64>,
    pub store_timestamp: i64,
}

#[pymethods]
impl Keys {
    #[new]
    fn new(hashes: Vec<i32>, physical: Vec<i64>, store_timestamp: i64) -> PyResult<Self> {
        guarded(|| {
            if hashes.len() != physical.len() {
                return Err(PyValueError::new_err("the columns have different lengths"));
            }
            Ok(Keys { hashes, physical, store_timestamp })
        })
    }

    fn __len__(&self) -> PyResult<usize> {
        guarded(|| Ok(self.hashes.len()))
    }

    /// The first ``count`` keys, and the others.
    fn split(&self, count: usize) -> PyResult<(Keys, Keys)> {
        guarded(|| {
            let at = count.min(self.hashes.len());
            let part = |from: usize, to: usize| Keys {
                hashes: self.hashes[from..to].to_vec(),
                physical: self.physical[from..to].to_vec(),
                store_timestamp: self.store_timestamp,
            };
            Ok((part(0, at), part(at, self.hashes.len())))
        })
    }

    /// (hash, log offset, store time) of each key.
    fn rows(&self) -> PyResult<Vec<(i32, i64, i64)>> {
        guarded(|| {
            let time = self.store_timestamp;
            Ok(self.hashes.iter().zip(&self.physical).map(|(hash, physical)| (*hash, *physical, time)).collect())
        })
    }
}

/// Hash, log offset and store time of each key of ``entries``, as bytes of i32, i64 and i64 in native byte order.
///
/// An entry is a Keys or (topic, keys, log offset, store time).
#[pyfunction]
pub fn flat<'py>(
    py: Python<'py>,
    entries: Vec<Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    guarded(|| flattened(py, entries))
}

fn flattened<'py>(
    py: Python<'py>,
    entries: Vec<Bound<'py, PyAny>>,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let mut hashes: Vec<i32> = Vec::with_capacity(2 * entries.len());
    let mut physical: Vec<i64> = Vec::with_capacity(2 * entries.len());
    let mut times: Vec<i64> = Vec::with_capacity(2 * entries.len());
    let mut topic = String::new();
    let mut front = Hash::of("#");
    for entry in entries {
        if let Ok(keys) = entry.cast::<Keys>() {
            let keys = keys.get();
            hashes.extend_from_slice(&keys.hashes);
            physical.extend_from_slice(&keys.physical);
            times.resize(times.len() + keys.hashes.len(), keys.store_timestamp);
            continue;
        }
        let entry = entry.cast::<PyTuple>()?;
        let (name, keys) = (entry.get_item(0)?, entry.get_item(1)?);
        let name = name.extract::<std::borrow::Cow<'_, str>>()?;
        let (place, time): (i64, i64) = (entry.get_item(2)?.extract()?, entry.get_item(3)?.extract()?);
        if topic != name {
            front = Hash::of(&name).then("#");
            topic = name.into_owned();
        }
        for key in keys.cast::<PyTuple>()? {
            hashes.push(front.then(&key.extract::<std::borrow::Cow<'_, str>>()?).in_index());
            physical.push(place);
            times.push(time);
        }
    }
    Ok((bytes_of(py, &hashes), bytes_of(py, &physical), bytes_of(py, &times)))
}

/// Whole seconds from ``begin`` to each time (ms), as i32 in native byte order.
#[pyfunction]
pub fn seconds<'py>(py: Python<'py>, times: &Bound<'py, PyAny>, begin: i64) -> PyResult<Bound<'py, PyByteArray>> {
    guarded(|| {
        let times = Source::<i64>::of(times)?;
        let seconds: Vec<u8> =
            times.slice().iter().flat_map(|time| seconds_since(begin, *time).to_ne_bytes()).collect();
        Ok(PyByteArray::new(py, &seconds))
    })
}

/// Write entries from number ``count`` on into the bytes of an index file. Returns how many slots were empty before.
#[pyfunction]
pub fn put_entries(
    file: &Bound<'_, PyAny>,
    slots: usize,
    count: u32,
    hashes: &Bound<'_, PyAny>,
    physical: &Bound<'_, PyAny>,
    seconds: &Bound<'_, PyAny>,
) -> PyResult<usize> {
    guarded(|| {
        let (hashes, physical) = (Source::<i32>::of(hashes)?, Source::<i64>::of(physical)?);
        let seconds = Source::<i32>::of(seconds)?;
        let mut file = Target::of(file, &[hashes.place(), physical.place(), seconds.place()])?;
        let (hashes, physical, seconds) = (hashes.slice(), physical.slice(), seconds.slice());
        if physical.len() != hashes.len() || seconds.len() != hashes.len() {
            return Err(fault("the columns have different lengths"));
        }
        let rows = hashes.iter().zip(physical).zip(seconds);
        let entries = rows.map(|((&hash, &physical), &seconds)| Entry { hash, physical, seconds });
        put(file.slice(), slots, count, entries).ok_or_else(|| fault("the entries do not fit into the file"))
    })
}

pub fn bytes_of<'py, T: Copy + ToBytes>(py: Python<'py>, numbers: &[T]) -> Bound<'py, PyBytes> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.bytes()).collect();
    PyBytes::new(py, &bytes)
}

/// Numbers as bytes in native byte order.
pub trait ToBytes {
    fn bytes(self) -> impl IntoIterator<Item = u8>;
}

impl ToBytes for i32 {
    fn bytes(self) -> impl IntoIterator<Item = u8> {
        self.to_ne_bytes()
    }
}

impl ToBytes for i64 {
    fn bytes(self) -> impl IntoIterator<Item = u8> {
        self.to_ne_bytes()
    }
}
