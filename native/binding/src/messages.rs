//! Sends and ends of transactions of a round, and batches.

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyList, PyTuple};
use trimq_native_core::batch;
use trimq_native_core::halves::Pending;
use trimq_native_core::hash::Hash;
use trimq_native_core::round::{Alone, Request, Round, Served, Single, Span};
use trimq_native_core::rows::{Context, Limits, Mismatch, Place, Position, Stamp, TAG_KEY};
use trimq_native_core::rules::{Names, ReplyTexts, Rules};

use crate::buffers::{Source, Target};
use crate::entries::Keys;
use crate::{fault, guarded};

/// Reads sends and batches by fixed rules.
#[pyclass(frozen)]
pub struct Reader {
    rules: Arc<Rules>,
}

#[pymethods]
impl Reader {
    #[new]
    #[pyo3(signature = (*, slow, fast, slow_prefixes, not_in_a_batch, added, tags, store_host, region, trace, language, version, half_topic, halves))]
    #[allow(clippy::too_many_arguments)] // all are passed by name
    fn new(
        slow: Vec<Vec<u8>>,
        fast: Vec<Vec<u8>>,
        slow_prefixes: Vec<Vec<u8>>,
        not_in_a_batch: Vec<Vec<u8>>,
        added: Vec<u8>,
        tags: bool,
        store_host: Vec<u8>,
        region: String,
        trace: String,
        language: (String, u8),
        version: i32,
        half_topic: String,
        halves: bool,
    ) -> PyResult<Self> {
        guarded(|| {
            if !is_host(&store_host) {
                return Err(PyValueError::new_err("a host has 8 or 20 bytes"));
            }
            let names = Names {
                slow: slow.into_iter().collect(),
                fast: fast.into_iter().collect(),
                slow_prefixes,
                not_in_a_batch: not_in_a_batch.into_iter().collect(),
            };
            let reply = ReplyTexts { region, trace, language, version };
            let rules = Rules { names, added, tags, store_host, reply, half_topic, halves };
            Ok(Reader { rules: Arc::new(rules) })
        })
    }

    /// Read the requests of a round. Spans are (begin, end, most requests), hosts the packed addresses of their clients.
    ///
    /// `most`: requests, and halves among them. `pending`: (start of the log, log, first state, states).
    #[allow(clippy::too_many_arguments)] // sources and numbers
    fn read(
        &self,
        frames: &Bound<'_, PyAny>,
        codes: Vec<u16>,
        spans: Vec<(usize, usize, usize)>,
        hosts: Vec<Vec<u8>>,
        most: (usize, usize),
        limits: (usize, usize),
        pending: (i64, Bound<'_, PyAny>, i64, Bound<'_, PyAny>),
    ) -> PyResult<Messages> {
        guarded(|| {
            if hosts.len() != spans.len() || !hosts.iter().all(|host| is_host(host)) {
                return Err(PyValueError::new_err("each span needs a host of 8 or 20 bytes"));
            }
            let source = Source::of(frames)?;
            let (start, log, first, states) = pending;
            let (log, states) = (Source::of(&log)?, Source::of(&states)?);
            let spans: Vec<Span> =
                spans.into_iter().map(|(begin, end, most)| Span { place: begin..end, most }).collect();
            let limits = Limits { body: limits.0, record: limits.1 };
            let slices: Vec<&[u8]> = hosts.iter().map(Vec::as_slice).collect();
            let pending = Pending { log: log.slice(), start, states: states.slice(), first };
            let served = Served { codes: &codes, most: most.0, halves: most.1, pending };
            let round = Round::read(source.slice(), &spans, &served, &self.rules, &slices, limits);
            Ok(Messages { rules: self.rules.clone(), round, spans, hosts, is_batch: false })
        })
    }

    /// Read a single JSON send of ``codes``; None if it is not ordinary, True if it is a half or the end of a transaction.
    ///
    /// (topic, queue id, offset of its body, properties with those added, born timestamp, flag, sysFlag,
    /// reconsumeTimes, tags code, keys, unique key, opaque).
    fn send<'py>(
        &self,
        py: Python<'py>,
        frame: &Bound<'py, PyAny>,
        codes: Vec<u16>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        guarded(|| self.single(py, frame, &codes))
    }

    /// Read a batch to one queue; None if it is not ordinary. ``stamp``: sysFlag, born timestamp, reconsumeTimes.
    fn batch(
        &self,
        body: &Bound<'_, PyAny>,
        topic: &str,
        queue_id: i32,
        stamp: (i32, i64, i32),
        host: Vec<u8>,
        limits: (usize, usize),
    ) -> PyResult<Option<Messages>> {
        guarded(|| {
            if !is_host(&host) {
                return Err(PyValueError::new_err("a host has 8 or 20 bytes"));
            }
            let source = Source::of(body)?;
            let limits = Limits { body: limits.0, record: limits.1 };
            let (sys_flag, born_timestamp, reconsume_times) = stamp;
            let stamp = Stamp { flag: 0, sys_flag, born_timestamp, reconsume_times, host: 0, half: None };
            let rules = &self.rules;
            let rows = batch::read(source.slice(), topic, queue_id, stamp, rules, &[&host], limits);
            Ok(rows.map(Round::of_batch).map(|round| Messages {
                rules: rules.clone(),
                round,
                spans: vec![],
                hosts: vec![host],
                is_batch: true,
            }))
        })
    }
}

impl Reader {
    fn single<'py>(
        &self,
        py: Python<'py>,
        frame: &Bound<'py, PyAny>,
        codes: &[u16],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let source = Source::of(frame)?;
        let mut arena = Vec::with_capacity(512);
        let single = match Single::read(source.slice(), codes, &mut arena) {
            Some(Alone::Send(single)) => single,
            Some(Alone::OfTransaction) => return Ok(Some(PyBool::new(py, true).to_owned().into_any())),
            None => return Ok(None),
        };
        let header = &single.header;
        let Ok(text) = std::str::from_utf8(&arena) else { return Ok(None) };
        let Some((unique, found)) = Single::found(text, &self.rules) else { return Ok(None) };
        let properties = PyBytes::new_with(py, text.len() + self.rules.added.len(), |bytes| {
            let (own, added) = bytes.split_at_mut(text.len());
            own.copy_from_slice(text.as_bytes());
            added.copy_from_slice(&self.rules.added);
            Ok(())
        })?;
        let mut keys = vec![unique.to_owned()];
        keys.extend(found.words().map(str::to_owned));
        let tags_code = found.tag.map_or(0, |tag| Hash::of(tag).value());
        keys.extend(found.tag.filter(|_| self.rules.tags).map(|tag| [TAG_KEY, tag].concat()));
        let keys = PyTuple::new(py, keys)?;
        let row = (
            header.topic,
            header.queue_id,
            single.body_at,
            properties,
            header.born_timestamp,
            header.flag,
            header.sys_flag,
            header.reconsume_times,
            tags_code,
            keys,
            unique.as_bytes(),
            header.opaque,
        );
        Ok(Some(row.into_pyobject(py)?.into_any()))
    }
}

/// Messages that were read and are to be written to the log.
#[pyclass]
pub struct Messages {
    rules: Arc<Rules>,
    round: Round,
    spans: Vec<Span>,
    hosts: Vec<Vec<u8>>,
    is_batch: bool,
}

#[pymethods]
impl Messages {
    fn __len__(&self) -> PyResult<usize> {
        guarded(|| Ok(self.round.rows.len()))
    }

    /// The total size of all records in bytes.
    #[getter]
    fn total(&self) -> PyResult<usize> {
        guarded(|| Ok(self.round.rows.total()))
    }

    /// (topic, queue id, messages, bytes) of each queue.
    fn queues(&self) -> PyResult<Vec<(&str, i32, usize, usize)>> {
        guarded(|| {
            let rows = &self.round.rows;
            Ok(rows.queues().iter().map(|queue| (rows.text(&queue.topic), queue.id, queue.count, queue.size)).collect())
        })
    }

    /// (number of requests, offset of the next one) of each span.
    fn parts(&self) -> PyResult<Vec<(usize, usize)>> {
        guarded(|| Ok(self.round.parts.iter().map(|part| (part.count, part.stop)).collect()))
    }

    /// (topic, queue id) of the real places of halves, and of those that are rolled back, each once.
    fn real_places(&self) -> PyResult<Vec<(&str, i32)>> {
        guarded(|| Ok(self.round.real_places().collect()))
    }

    /// (queue offset of the half, whether it is committed) of each end of a transaction.
    fn ends(&self) -> PyResult<Vec<(i64, bool)>> {
        guarded(|| {
            Ok(self.round.requests.iter().filter_map(|one| one.end).map(|end| (end.offset, end.commit)).collect())
        })
    }

    /// Drop the requests to queues, or of real places, that are not good, and the later requests of the same connections.
    fn leave_out(&mut self, good: Vec<bool>, real: Vec<bool>) -> PyResult<()> {
        guarded(|| {
            self.round.leave_out(&self.spans, &good, &real);
            Ok(())
        })
    }

    /// Write the records into ``buffer`` at ``at``, except the first 8 bytes, which are returned.
    ///
    /// ``frames``: the bytes that they were read from. ``starts``: the next offset of each queue.
    #[allow(clippy::too_many_arguments)] // source, target and numbers
    fn write<'py>(
        &mut self,
        py: Python<'py>,
        frames: &Bound<'py, PyAny>,
        buffer: &Bound<'py, PyAny>,
        at: usize,
        physical_offset: i64,
        store_timestamp: i64,
        starts: Vec<i64>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        guarded(|| {
            let source = Source::of(frames)?;
            let mut target = Target::of(buffer, &[source.place()])?;
            let position = Position { physical_offset, store_timestamp };
            let Messages { rules, round, hosts, is_batch, .. } = self;
            let hosts: Vec<&[u8]> = hosts.iter().map(Vec::as_slice).collect();
            let limits = Limits { body: usize::MAX, record: usize::MAX }; // the limits were checked when the messages were read
            let added = if *is_batch { 0 } else { rules.added.len() };
            let context = Context { rules, added, hosts: &hosts, limits };
            let end = at.checked_add(round.rows.total());
            let out = end
                .and_then(|end| target.slice().get_mut(at..end))
                .ok_or_else(|| fault("the records do not fit into the buffer"))?;
            let head = round.rows.write(source.slice(), out, &position, &starts, &context);
            let head = head.map_err(|Mismatch(what)| fault(&format!("{what} do not match")))?;
            Ok(PyBytes::new(py, &head))
        })
    }

    /// The units of all messages, grouped by queue. Valid after ``write``.
    fn units<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        guarded(|| Ok(PyBytes::new(py, self.round.rows.units())))
    }

    /// The keys of all messages. Valid after ``write``.
    fn keys(&self, store_timestamp: i64) -> PyResult<Keys> {
        guarded(|| {
            let rows = &self.round.rows;
            let mut physical = Vec::with_capacity(rows.hashes().len());
            for (keys, place) in rows.keys().zip(rows.places()) {
                physical.resize(physical.len() + keys, place.physical);
            }
            Ok(Keys { hashes: rows.hashes().to_vec(), physical, store_timestamp })
        })
    }

    /// The log offset of each message. Valid after ``write``.
    fn physical_offsets(&self) -> PyResult<Vec<i64>> {
        guarded(|| Ok(self.round.rows.places().iter().map(|place| place.physical).collect()))
    }

    /// The replies to each span, joined. Valid after ``write``.
    fn replies<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        guarded(|| PyList::new(py, self.round.replies(&self.rules).iter().map(|reply| PyBytes::new(py, reply))))
    }

    /// (span, opaque, binary, queue, queue id that it names, unique key, log offset, queue offset, size, whether it is the
    /// end of a transaction, whether its client expects no reply) of each request.
    ///
    /// Queue and offsets are -1 for a request without a message, offsets also before ``write``.
    #[allow(clippy::type_complexity)] // a row of a table
    fn requests(&self) -> PyResult<Vec<(usize, i32, bool, isize, i32, &str, i64, i64, usize, bool, bool)>> {
        guarded(|| {
            let rows = &self.round.rows;
            let row = |request: &Request| {
                let Place { physical, in_queue } = self.round.place_of(request);
                let queue = request.row.and_then(|row| rows.queue_of(row)).map_or(-1, |queue| queue as isize);
                let size = request.row.map_or(0, |row| rows.size_of(row));
                let Request { span, opaque, binary, queue_id, end, .. } = *request;
                let unique = rows.text(&request.unique);
                let oneway = end.is_some_and(|end| end.oneway);
                (span, opaque, binary, queue, queue_id, unique, physical, in_queue, size, end.is_some(), oneway)
            };
            Ok(self.round.requests.iter().map(row).collect())
        })
    }
}

fn is_host(host: &[u8]) -> bool {
    matches!(host.len(), 8 | 20)
}
