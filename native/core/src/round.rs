//! Sends and ends of transactions of a round: frames of many connections in, records and replies out.

use std::ops::Range;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::halves::{append, end_of, sent, Committed, End, Pending, PREPARED};
use crate::header::{code_of, end_in, send_in_binary, send_in_json, EndHeader, SendHeader, END_TRANSACTION};
use crate::rows::{Context, Draft, Limits, Mismatch, Place, Position, Rows, Stamp, HEAD};
use crate::rules::{Found, Rules, MAX_PROPERTIES};

const WORDS: usize = 8;
/// The bytes of the records that the ends of a round read. Their requests are short, so the receive buffer limits only
/// the sends of a round: without this, one round could copy a gigabyte while all other clients wait.
const MOST_READ: usize = 1 << 20;
/// Messages with longer unique keys, which no client generates, are not served here.
const LONGEST_UNIQUE: usize = 256;

/// Consecutive frames of a connection: bytes [begin, end) of the buffer that they are read from.
///
/// The last frame may be incomplete.
#[derive(Clone, Debug)]
pub struct Span {
    /// Begin and end of the frames.
    pub place: Range<usize>,
    /// The most requests of the span that may be served.
    pub most: usize,
}

/// How far a span was read: the number of frames, and where the last of them ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of frames.
    pub count: usize,
    /// The start of the next frame.
    pub stop: usize,
}

/// What may be served in a round.
#[derive(Clone, Copy, Debug, Default)]
pub struct Served<'a> {
    /// The codes of the requests that may be served.
    pub codes: &'a [u16],
    /// The most requests.
    pub most: usize,
    /// The most halves of transactions.
    pub halves: usize,
    /// The halves that may be ended.
    pub pending: Pending<'a>,
}

/// A request, which has at most one message: a rollback has none.
#[derive(Clone, Debug)]
pub struct Request {
    /// The number of its span.
    pub span: usize,
    /// Its opaque number.
    pub opaque: i32,
    /// Whether its header is in RocketMQ's binary form.
    pub binary: bool,
    /// The position of its unique key in the texts of the rows.
    pub unique: Range<usize>,
    /// The queue that it names.
    pub queue_id: i32,
    /// The number of its message in the rows.
    pub row: Option<usize>,
    /// For a half, and for a rollback: the number of its real topic and queue.
    real: Option<usize>,
    /// If it ends a transaction: how.
    pub end: Option<End>,
    stop: usize,
}

/// The messages read from the frames of a round.
#[derive(Debug, Default)]
pub struct Round {
    /// The messages.
    pub rows: Rows,
    /// The requests, in the order of their messages.
    pub requests: Vec<Request>,
    /// How far each span was read.
    pub parts: Vec<Part>,
    /// The real topics and queues of halves, and of those that are rolled back.
    real: Vec<(Range<usize>, i32)>,
}

/// The queues and halves that the requests read so far name.
#[derive(Default)]
struct Known<'a> {
    queues: FxHashMap<(&'a str, i32), usize>,
    real: FxHashMap<(&'a str, i32), usize>,
    ended: FxHashSet<i64>,
    halves: usize,
    /// The bytes of the records that were read from the log.
    read: usize,
}

impl Round {
    /// The messages of a batch, which have no requests and spans.
    pub fn of_batch(rows: Rows) -> Round {
        Round { rows, ..Round::default() }
    }

    /// Read the requests of each span up to the first one that is not an ordinary one of the codes in `served`.
    pub fn read<'a>(
        frames: &'a [u8],
        spans: &[Span],
        served: &Served<'a>,
        rules: &'a Rules,
        hosts: &[&[u8]],
        limits: Limits,
    ) -> Round {
        let context = Context { rules, added: rules.added.len(), hosts, limits };
        let mut round = Round::default();
        let mut known = Known::default();
        for (number, span) in spans.iter().enumerate() {
            let mut part = Part { count: 0, stop: span.place.start };
            while part.count < span.most && round.requests.len() < served.most {
                let place = part.stop..span.place.end;
                let Some(stop) = round.take(frames, place, number, served, &mut known, &context) else { break };
                part = Part { count: part.count + 1, stop };
            }
            round.parts.push(part);
        }
        round
    }

    /// Read the frame at the start of `place` and return its end. None: it is not served, and nothing has changed.
    fn take<'a>(
        &mut self,
        frames: &'a [u8],
        place: Range<usize>,
        span: usize,
        served: &Served<'a>,
        known: &mut Known<'a>,
        context: &Context<'_, 'a>,
    ) -> Option<usize> {
        let frame = Frame::of(frames.get(place.clone())?)?;
        let before = self.rows.texts.len();
        let stop = place.start + frame.length;
        let body = place.start + frame.body_at..stop;
        let code = code_of(frame.head, frame.encoding).filter(|code| served.codes.contains(code))?;
        let mut request = Request {
            span,
            opaque: 0,
            binary: frame.encoding == 1,
            unique: 0..0,
            queue_id: 0,
            row: None,
            real: None,
            end: None,
            stop,
        };
        let taken = if code == END_TRANSACTION {
            let header = end_in(frame.head, frame.encoding)?;
            self.take_end(&header, &mut request, served, known, context)
        } else {
            self.take_send(frame.head, code, body, &mut request, served, known, context)
        };
        if taken.is_none() {
            self.rows.texts.truncate(before); // the texts of a message that was not added
            return None;
        }
        self.requests.push(request);
        Some(stop)
    }

    #[allow(clippy::too_many_arguments)] // all parts of a decoded frame
    fn take_send<'a>(
        &mut self,
        head: &'a [u8],
        code: u16,
        body: Range<usize>,
        request: &mut Request,
        served: &Served<'a>,
        known: &mut Known<'a>,
        context: &Context<'_, 'a>,
    ) -> Option<()> {
        let header = match request.binary {
            false => send_in_json(head, code, &mut self.rows.texts)?,
            true => send_in_binary(head, code, &mut self.rows.texts)?,
        };
        let rules = context.rules;
        if header.topic == rules.half_topic {
            return None;
        }
        let is_half = header.sys_flag & PREPARED != 0;
        if is_half && !rules.halves {
            return None;
        }
        // a copy, since `rows` is changed below while the text is used; the properties of most messages are short
        let text = self.rows.text(&header.properties).to_owned();
        let found = if is_half { sent(&text, header.sys_flag, rules)? } else { rules.names.ordinary(&text)? };
        let unique = Single::unique(&found)?;
        let begin = header.properties.start + place_of(unique, &text);
        request.unique = begin..begin + unique.len();
        request.opaque = header.opaque;
        request.queue_id = header.queue_id;
        let stamp = Stamp {
            flag: header.flag,
            sys_flag: header.sys_flag & !PREPARED,
            born_timestamp: header.born_timestamp,
            reconsume_times: header.reconsume_times,
            host: request.span,
            half: None,
        };
        let mut draft = Draft { body, text: header.properties, complete: is_half, stamp, ..Draft::default() };
        let place = (header.topic, header.queue_id);
        if !is_half {
            request.row = Some(self.add(place, draft, &found, known, context)?);
            return Some(());
        }
        let may_be_stored = known.halves < served.halves && header.reconsume_times == 0 && header.queue_id >= 0;
        if !may_be_stored || !append(&mut self.rows.texts, &mut draft.text, unique, place.0, place.1, rules) {
            return None;
        }
        request.row = Some(self.add((&rules.half_topic, 0), draft, &found, known, context)?);
        request.real = Some(self.add_real(place, known));
        known.halves += 1;
        Some(())
    }

    /// The number of a real topic and queue, whose message goes elsewhere or is none.
    fn add_real<'a>(&mut self, place: (&'a str, i32), known: &mut Known<'a>) -> usize {
        *known.real.entry(place).or_insert_with(|| {
            let begin = self.rows.texts.len();
            self.rows.texts.extend_from_slice(place.0.as_bytes());
            self.real.push((begin..self.rows.texts.len(), place.1));
            self.real.len() - 1
        })
    }

    fn take_end<'a>(
        &mut self,
        header: &EndHeader<'_>,
        request: &mut Request,
        served: &Served<'a>,
        known: &mut Known<'a>,
        context: &Context<'_, 'a>,
    ) -> Option<()> {
        let end = end_of(header).filter(|_| context.rules.halves)?;
        if known.ended.contains(&end.offset) {
            return None; // the first of them has not been stored yet
        }
        let half = served.pending.half(header, MOST_READ - known.read, context.rules)?;
        known.read += half.size;
        let committed = half.committed(header.group, context.rules)?;
        request.opaque = header.opaque;
        request.end = Some(end);
        if !end.commit {
            request.real = Some(self.add_real((committed.topic, committed.queue_id), known));
        } else {
            let texts = &mut self.rows.texts;
            let mut copied = |bytes: &[u8]| {
                let begin = texts.len();
                texts.extend_from_slice(bytes);
                begin..texts.len()
            };
            let draft = Draft {
                body: copied(half.body),
                in_texts: true,
                text: copied(committed.text.as_bytes()),
                complete: true,
                host: Some(copied(half.born_host)),
                stamp: Stamp {
                    flag: half.flag,
                    sys_flag: half.sys_flag,
                    born_timestamp: half.born_timestamp,
                    reconsume_times: half.reconsume_times,
                    host: 0,
                    half: Some(header.physical),
                },
            };
            let Committed { found, topic, queue_id, .. } = committed;
            if topic == context.rules.half_topic || found.unique.is_none() {
                return None;
            }
            request.queue_id = queue_id;
            request.row = Some(self.add((topic, queue_id), draft, &found, known, context)?);
        }
        known.ended.insert(end.offset);
        Some(())
    }

    /// Add a message to its queue and return its number. None if it exceeds a limit.
    fn add<'a>(
        &mut self,
        place: (&'a str, i32),
        draft: Draft,
        found: &Found<'_>,
        known: &mut Known<'a>,
        context: &Context<'_, 'a>,
    ) -> Option<usize> {
        let met = known.queues.get(&place).copied();
        let queue = match met {
            Some(queue) => queue,
            None => self.rows.add_queue(place.0, place.1)?,
        };
        if !self.rows.add(queue, draft, found, context) {
            if met.is_none() {
                self.rows.take_back_queue();
            }
            return None;
        }
        // only now, when the queue has a message: a queue that was taken back must not stay known
        if met.is_none() {
            known.queues.insert(place, queue);
        }
        Some(self.rows.len() - 1)
    }

    /// The real topics and queues of halves, and of those that are rolled back.
    pub fn real_places(&self) -> impl Iterator<Item = (&str, i32)> {
        self.real.iter().map(|(topic, queue_id)| (self.rows.text(topic), *queue_id))
    }

    /// Drop the requests to queues that are not good, and the later requests of the same connections.
    ///
    /// `is_good`: for each queue of the rows; `is_real`: for each of the real topics and queues.
    pub fn leave_out(&mut self, spans: &[Span], is_good: &[bool], is_real: &[bool]) {
        // Once a message of a span is dropped, the span ends before it: replies and order of a connection stay intact.
        let mut ended = vec![false; self.parts.len()];
        for (part, span) in self.parts.iter_mut().zip(spans) {
            *part = Part { count: 0, stop: span.place.start };
        }
        let mut keep = vec![false; self.rows.len()];
        let mut kept = 0;
        let rows = &self.rows;
        self.requests.retain_mut(|request| {
            let queue = request.row.and_then(|row| rows.queue_of(row));
            let good = queue.map_or(request.row.is_none(), |queue| is_good.get(queue) == Some(&true))
                && request.real.is_none_or(|real| is_real.get(real) == Some(&true));
            ended[request.span] |= !good;
            if ended[request.span] {
                return false;
            }
            let part = &mut self.parts[request.span];
            *part = Part { count: part.count + 1, stop: request.stop };
            if let Some(row) = request.row.as_mut() {
                keep[*row] = true;
                *row = kept;
                kept += 1;
            }
            true
        });
        self.rows.retain(&keep);
        // only those that are named still: the caller checks them again
        let mut numbers: Vec<Option<usize>> = vec![None; self.real.len()];
        let real = std::mem::take(&mut self.real);
        for request in &mut self.requests {
            let Some(number) = request.real else { continue };
            request.real = Some(*numbers[number].get_or_insert_with(|| {
                self.real.push(real[number].clone());
                self.real.len() - 1
            }));
        }
    }

    /// See Rows::write.
    pub fn write(
        &mut self,
        frames: &[u8],
        out: &mut [u8],
        at: &Position,
        starts: &[i64],
        rules: &Rules,
        hosts: &[&[u8]],
    ) -> Result<[u8; HEAD], Mismatch> {
        let limits = Limits { body: usize::MAX, record: usize::MAX };
        self.rows.write(frames, out, at, starts, &Context { rules, added: rules.added.len(), hosts, limits })
    }

    /// The place of a request's message; -1 before it was written, or without one.
    pub fn place_of(&self, request: &Request) -> Place {
        let place = request.row.and_then(|row| self.rows.places().get(row));
        place.copied().unwrap_or(Place { physical: -1, in_queue: -1 })
    }

    /// The replies to each span, joined. Valid after the messages were written.
    pub fn replies(&self, rules: &Rules) -> Vec<Vec<u8>> {
        let mut replies: Vec<Vec<u8>> = Vec::new();
        replies.resize_with(self.parts.len(), Vec::new);
        for request in &self.requests {
            let out = &mut replies[request.span];
            if let Some(end) = request.end {
                if !end.oneway {
                    crate::reply::plain(out, rules, request.opaque, request.binary);
                }
                continue;
            }
            let stored = crate::reply::Stored {
                opaque: request.opaque,
                queue_id: request.queue_id,
                place: self.place_of(request),
                unique: self.rows.text(&request.unique),
            };
            crate::reply::send(out, rules, &stored, request.binary);
        }
        replies
    }
}

/// A frame: its words, and the bytes of its header.
pub(crate) struct Frame<'a> {
    pub(crate) length: usize,
    pub(crate) encoding: u32,
    pub(crate) head: &'a [u8],
    pub(crate) body_at: usize,
}

impl<'a> Frame<'a> {
    /// The frame at the start of `bytes`. None if it is incomplete, or its lengths are inconsistent.
    pub(crate) fn of(bytes: &'a [u8]) -> Option<Frame<'a>> {
        let total = u32::from_be_bytes(bytes.get(..4)?.try_into().ok()?) as usize;
        let word = u32::from_be_bytes(bytes.get(4..WORDS)?.try_into().ok()?);
        let length = total.checked_add(4)?;
        let body_at = WORDS + (word & 0xFF_FFFF) as usize;
        if length > bytes.len() || body_at > length {
            return None;
        }
        Some(Frame { length, encoding: word >> 24, head: bytes.get(WORDS..body_at)?, body_at })
    }
}

/// A send that is read on its own.
#[derive(Debug, PartialEq, Eq)]
pub struct Single<'a> {
    /// Its header, whose properties are in the arena.
    pub header: SendHeader<'a>,
    /// The start of its body, which ends with the frame.
    pub body_at: usize,
}

/// A request that is read on its own.
#[derive(Debug, PartialEq, Eq)]
pub enum Alone<'a> {
    /// A send.
    Send(Single<'a>),
    /// A half of a transaction or the end of one, to be read as a round.
    OfTransaction,
}

impl<'a> Single<'a> {
    /// Read a frame that is one ordinary JSON send, and append its properties to `arena`. None for others.
    ///
    /// `codes`: those that may be served. `found` parses these properties. The limits of bodies and records are left to
    /// the caller.
    pub fn read(frame: &'a [u8], codes: &[u16], arena: &mut Vec<u8>) -> Option<Alone<'a>> {
        let Frame { length, encoding, head, body_at } = Frame::of(frame)?;
        if encoding != 0 || length != frame.len() {
            return None;
        }
        let code = code_of(head, encoding).filter(|code| codes.contains(code))?;
        if code == END_TRANSACTION {
            return Some(Alone::OfTransaction);
        }
        let header = send_in_json(head, code, arena)?;
        if header.sys_flag & PREPARED != 0 {
            return Some(Alone::OfTransaction);
        }
        let stamp = Stamp { sys_flag: header.sys_flag, ..Stamp::default() };
        let is_ordinary = stamp.is_ordinary() && header.properties.len() <= MAX_PROPERTIES && body_at < length;
        is_ordinary.then_some(Alone::Send(Single { header, body_at }))
    }

    /// Parse the properties. None if they are not ordinary, or have no unique key.
    pub fn found<'t>(text: &'t str, rules: &Rules) -> Option<(&'t str, Found<'t>)> {
        let found = rules.names.ordinary(text)?;
        Some((Single::unique(&found)?, found))
    }

    /// The unique key, if it is as clients generate them.
    fn unique<'t>(found: &Found<'t>) -> Option<&'t str> {
        found.unique.filter(|unique| unique.len() <= LONGEST_UNIQUE)
    }
}

/// The position of `part` in the text that it is a slice of.
fn place_of(part: &str, whole: &str) -> usize {
    part.as_ptr() as usize - whole.as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(topic: &str, key: &str, body: &[u8]) -> Vec<u8> {
        let head = format!(
            concat!(
                r#"{{"code":310,"extFields":{{"a":"g","b":"{}","c":"T","d":"4","e":"1","f":"0","g":"17","h":"0","#,
                r#""i":"UNIQ_KEY\u0001{}\u0002"}},"opaque":7}}"#
            ),
            topic, key
        );
        let words = [(4 + head.len() + body.len()) as u32, head.len() as u32];
        [&words[0].to_be_bytes(), &words[1].to_be_bytes(), head.as_bytes(), body].concat()
    }

    #[test]
    fn the_queue_of_a_message_that_is_not_served_is_forgotten() {
        let (rules, limits) = (Rules::default(), Limits { body: 100, record: 1000 });
        let hosts: [&[u8]; 3] = [&[1; 8]; 3];
        let mut frames = Vec::new();
        let mut spans = Vec::new();
        // the last text lies where the others' topics lay
        for (topic, key, body) in
            [("Orders", "A", vec![1; 101]), ("Payments", "B", vec![]), ("Orders", "OrdersPayments", vec![1; 100])]
        {
            let begin = frames.len();
            frames.extend(frame(topic, key, &body));
            spans.push(Span { place: begin..frames.len(), most: 9 });
        }
        let served = Served { codes: &[310], most: 9, ..Served::default() };
        let round = Round::read(&frames, &spans, &served, &rules, &hosts, limits);
        assert_eq!(round.parts.iter().map(|part| part.count).collect::<Vec<_>>(), [0, 0, 1]);
        let queues: Vec<&str> = round.rows.queues().iter().map(|queue| round.rows.text(&queue.topic)).collect();
        assert_eq!(queues, ["Orders"]);
    }
}
