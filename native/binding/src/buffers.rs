//! Python's buffers as slices, for the duration of a call.

use std::ops::Range;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A buffer to read. It is released at the end of the call, so that its owner can be closed afterwards.
pub struct Source<T: Element = u8>(PyBuffer<T>);

impl<T: Element> Source<T> {
    /// Acquire a contiguous buffer of this element type.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<T>::get(object)?;
        if !buffer.is_c_contiguous() {
            return Err(PyValueError::new_err("the buffer is not contiguous"));
        }
        Ok(Source(buffer))
    }

    /// Its elements.
    pub fn slice(&self) -> &[T] {
        if self.0.item_count() == 0 {
            return &[];
        }
        // SAFETY: the buffer is contiguous, of this type (checked by PyBuffer::get), and cannot be resized or freed
        // while it is held. Nothing writes into it: this thread holds the interpreter until the call ends (tier_batch,
        // which does not, is given records of the log that are complete, and never written again), and a call with a
        // Target has checked that all of its Sources are disjoint from it (Target::of).
        unsafe { std::slice::from_raw_parts(self.0.buf_ptr().cast::<T>(), self.0.item_count()) }
    }

    /// The addresses of its bytes, for Target::of.
    pub fn place(&self) -> Range<usize> {
        place(&self.0)
    }
}

/// A buffer of bytes to write into.
pub struct Target(PyBuffer<u8>);

impl Target {
    /// Acquire a contiguous, writable buffer that shares no byte with the other buffers of the call.
    ///
    /// `others`: the addresses of all buffers that the call reads.
    pub fn of(object: &Bound<'_, PyAny>, others: &[Range<usize>]) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(object)?;
        if !buffer.is_c_contiguous() || buffer.readonly() {
            return Err(PyValueError::new_err("the buffer is not contiguous or read-only"));
        }
        let own = place(&buffer);
        if others.iter().any(|other| own.start < other.end && other.start < own.end) {
            return Err(PyValueError::new_err("the buffer to write overlaps a buffer to read"));
        }
        Ok(Target(buffer))
    }

    /// Its bytes.
    pub fn slice(&mut self) -> &mut [u8] {
        if self.0.len_bytes() == 0 {
            return &mut [];
        }
        // SAFETY: as for Source; it is writable, and shares no byte with a slice that is read in this call. The one that
        // tier_batch gets is known to its caller only.
        unsafe { std::slice::from_raw_parts_mut(self.0.buf_ptr().cast::<u8>(), self.0.len_bytes()) }
    }
}

fn place<T: Element>(buffer: &PyBuffer<T>) -> Range<usize> {
    let begin = buffer.buf_ptr() as usize;
    begin..begin + buffer.len_bytes()
}
