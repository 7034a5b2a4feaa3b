//! Signatures of requests.

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use trimq_native_core::round::Span;
use trimq_native_core::signers as core;
use trimq_native_core::stamp::Stamp;

use crate::buffers::Source;
use crate::guarded;

/// (number of the user, code, topic).
type Asked<'a> = (usize, u16, Option<&'a str>);

/// (code, time, sender, number).
type StampRow<'py> = (u64, u64, Bound<'py, PyBytes>, u64);

/// The users whose signatures are known.
#[pyclass]
pub struct Signers(core::Signers);

#[pymethods]
impl Signers {
    /// ``topics``: the codes of frames, and the field of each that names its topic. ``mark``: the signed text of
    /// requests with a stamp begins so. ``unknown``: a secret that no user has.
    #[new]
    fn new(topics: Vec<(u16, String)>, mark: Vec<u8>, unknown: &[u8]) -> PyResult<Self> {
        guarded(|| Ok(Signers(core::Signers::new(topics, mark, unknown))))
    }

    /// Add a user, who must not be known yet, and return the number. ``needs_stamp``: requests without one are left.
    fn add(&mut self, name: &str, secret: &[u8], needs_stamp: bool) -> PyResult<usize> {
        guarded(|| Ok(self.0.add(name, secret, needs_stamp)))
    }

    /// The user who has signed a request with this JSON header; with a stamp (user, stamp).
    fn signer(&self, py: Python<'_>, head: &Bound<'_, PyAny>, body: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        guarded(|| {
            let (head, body) = (Source::<u8>::of(head)?, Source::<u8>::of(body)?);
            let found = match self.0.signer(head.slice(), body.slice()) {
                None => return Ok(None),
                Some((user, None)) => user.into_pyobject(py)?.into_any(),
                Some((user, Some(stamp))) => (user, stamp_row(py, &stamp)).into_pyobject(py)?.into_any(),
            };
            Ok(Some(found.unbind()))
        })
    }

    /// (number of the user who has signed a frame, code, topic, stamp if there is one).
    fn asked(&self, py: Python<'_>, frame: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        guarded(|| {
            let source = Source::<u8>::of(frame)?;
            let found = self.0.asked(source.slice());
            let found = found.map(|(one, stamp)| {
                let stamp = stamp.map(|stamp| stamp_row(py, &stamp));
                Ok((one.user, one.code, one.topic, stamp).into_pyobject(py)?.into_any().unbind())
            });
            found.transpose()
        })
    }

    /// For each span (begin, end, most) (number of signed frames at its start, where they end, what is asked for): the
    /// last with the number of frames before the first one with it, and their end. At most ``most`` frames in all.
    /// And those with a stamp, in their order: (number of the span, frames before it, their end, user, code, stamp).
    fn round(
        &self,
        py: Python<'_>,
        frames: &Bound<'_, PyAny>,
        spans: Vec<(usize, usize, usize)>,
        most: usize,
    ) -> PyResult<Py<PyAny>> {
        guarded(|| {
            let source = Source::<u8>::of(frames)?;
            let spans: Vec<Span> =
                spans.into_iter().map(|(begin, end, most)| Span { place: begin..end, most }).collect();
            let found = self.0.round(source.slice(), &spans, most);
            let rows: Vec<_> = found
                .iter()
                .map(|one| {
                    let asked = one.asked.iter().map(|(asked, before)| (row(asked), before.count, before.stop));
                    (one.part.count, one.part.stop, asked.collect::<Vec<_>>())
                })
                .collect();
            let stamped: Vec<_> = found
                .iter()
                .enumerate()
                .flat_map(|(span, one)| one.stamped.iter().map(move |frame| (span, frame)))
                .map(|(span, one)| {
                    (span, one.before.count, one.before.stop, one.user, one.code, stamp_row(py, &one.stamp))
                })
                .collect();
            Ok((rows, stamped).into_pyobject(py)?.into_any().unbind())
        })
    }
}

fn row<'a>(asked: &core::Asked<'a>) -> Asked<'a> {
    (asked.user, asked.code, asked.topic)
}

fn stamp_row<'py>(py: Python<'py>, stamp: &Stamp) -> StampRow<'py> {
    (stamp.code, stamp.time, PyBytes::new(py, &stamp.sender), stamp.number)
}
