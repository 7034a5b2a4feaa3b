//! Signatures of requests.

use pyo3::prelude::*;
use trimq_native_core::round::Span;
use trimq_native_core::signers as core;

use crate::buffers::Source;
use crate::guarded;

/// (number of the user, code, topic).
type Asked<'a> = (usize, u16, Option<&'a str>);

/// The users whose signatures are known.
#[pyclass]
pub struct Signers(core::Signers);

#[pymethods]
impl Signers {
    /// ``topics``: the codes of frames, and the field of each that names its topic. ``mark``: requests whose signed text
    /// begins so are left. ``unknown``: a secret that no user has.
    #[new]
    fn new(topics: Vec<(u16, String)>, mark: Vec<u8>, unknown: &[u8]) -> PyResult<Self> {
        guarded(|| Ok(Signers(core::Signers::new(topics, mark, unknown))))
    }

    /// Add a user, who must not be known yet, and return the number.
    fn add(&mut self, name: &str, secret: &[u8]) -> PyResult<usize> {
        guarded(|| Ok(self.0.add(name, secret)))
    }

    /// The user who has signed a request with this JSON header.
    fn signer(&self, head: &Bound<'_, PyAny>, body: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
        guarded(|| {
            let (head, body) = (Source::<u8>::of(head)?, Source::<u8>::of(body)?);
            Ok(self.0.signer(head.slice(), body.slice()))
        })
    }

    /// (number of the user who has signed a frame, code, topic).
    fn asked(&self, py: Python<'_>, frame: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        guarded(|| {
            let source = Source::<u8>::of(frame)?;
            let found = self.0.asked(source.slice());
            found.map(|one| Ok(row(&one).into_pyobject(py)?.into_any().unbind())).transpose()
        })
    }

    /// For each span (begin, end, most) (number of signed frames at its start, where they end, what is asked for): the
    /// last with the number of frames before the first one with it, and their end. At most ``most`` frames in all.
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
            Ok(rows.into_pyobject(py)?.into_any().unbind())
        })
    }
}

fn row<'a>(asked: &core::Asked<'a>) -> Asked<'a> {
    (asked.user, asked.code, asked.topic)
}
