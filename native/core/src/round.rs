//! Sends of a round: frames of many connections in, records and replies out.

use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::header::{send_in_binary, send_in_json, SendHeader};
use crate::rows::{Context, Limits, Mismatch, Position, Rows, Stamp, HEAD};
use crate::rules::{Found, Rules, MAX_PROPERTIES};

const WORDS: usize = 8;
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

/// A request, which is one message.
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
    stop: usize,
}

/// The messages read from the frames of a round.
#[derive(Debug, Default)]
pub struct Round {
    /// The messages.
    pub rows: Rows,
    /// The requests that sent them, one for each message.
    pub requests: Vec<Request>,
    /// How far each span was read.
    pub parts: Vec<Part>,
    code: u16,
}

impl Round {
    /// The messages of a batch, which have no requests and spans.
    pub fn of_batch(rows: Rows) -> Round {
        Round { rows, ..Round::default() }
    }

    /// Read the sends of each span up to the first one that is not an ordinary send of `code`; `most` in all.
    pub fn read(
        frames: &[u8],
        code: u16,
        spans: &[Span],
        most: usize,
        rules: &Rules,
        hosts: &[&[u8]],
        limits: Limits,
    ) -> Round {
        let context = Context { rules, added: rules.added.len(), hosts, limits };
        let mut round = Round { code, ..Round::default() };
        let mut known: FxHashMap<(&str, i32), usize> = FxHashMap::default();
        for (number, span) in spans.iter().enumerate() {
            let mut part = Part { count: 0, stop: span.place.start };
            while part.count < span.most && round.requests.len() < most {
                let Some(stop) = round.take(frames, part.stop..span.place.end, number, &mut known, &context) else {
                    break;
                };
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
        known: &mut FxHashMap<(&'a str, i32), usize>,
        context: &Context<'_>,
    ) -> Option<usize> {
        let frame = Frame::of(frames.get(place.clone())?)?;
        let before = self.rows.texts.len();
        let stop = place.start + frame.length;
        let body = place.start + frame.body_at..stop;
        let taken = self.take_send(frame.head, frame.encoding, span, body, stop, known, context);
        if taken.is_none() {
            self.rows.texts.truncate(before); // the properties of a message that was not added
        }
        taken.map(|()| stop)
    }

    #[allow(clippy::too_many_arguments)] // all parts of a decoded frame
    fn take_send<'a>(
        &mut self,
        head: &'a [u8],
        encoding: u32,
        span: usize,
        body: Range<usize>,
        stop: usize,
        known: &mut FxHashMap<(&'a str, i32), usize>,
        context: &Context<'_>,
    ) -> Option<()> {
        let header = match encoding {
            0 => send_in_json(head, self.code, &mut self.rows.texts)?,
            1 => send_in_binary(head, self.code, &mut self.rows.texts)?,
            _ => return None,
        };
        // a copy, since `rows` is changed below while the text is used; the properties of most messages are short
        let text = self.rows.text(&header.properties).to_owned();
        let (unique, found) = Single::found(&text, context.rules)?;
        let unique_at = header.properties.start + place_of(unique, &text);
        let stamp = Stamp {
            flag: header.flag,
            sys_flag: header.sys_flag,
            born_timestamp: header.born_timestamp,
            reconsume_times: header.reconsume_times,
            host: span,
        };
        let place = (header.topic, header.queue_id);
        let met = known.get(&place).copied();
        let queue = match met {
            Some(queue) => queue,
            None => self.rows.add_queue(header.topic, header.queue_id)?,
        };
        if !self.rows.add(queue, body, header.properties, stamp, &found, context) {
            if met.is_none() {
                self.rows.take_back_queue();
            }
            return None;
        }
        // only now, when the queue has a message: a queue that was taken back must not stay known
        if met.is_none() {
            known.insert(place, queue);
        }
        let unique = unique_at..unique_at + unique.len();
        self.requests.push(Request { span, opaque: header.opaque, binary: encoding == 1, unique, stop });
        Some(())
    }

    /// Drop the messages to queues for which `is_good` is false, and the later messages of the same connections.
    pub fn leave_out(&mut self, spans: &[Span], is_good: &[bool]) {
        // Once a message of a span is dropped, the span ends before it: replies and order of a connection stay intact.
        let mut ended = vec![false; self.parts.len()];
        for (part, span) in self.parts.iter_mut().zip(spans) {
            *part = Part { count: 0, stop: span.place.start };
        }
        let mut keep = Vec::with_capacity(self.requests.len());
        for (number, request) in self.requests.iter().enumerate() {
            let good = self.rows.queue_of(number).is_some_and(|queue| is_good.get(queue) == Some(&true));
            ended[request.span] |= !good;
            keep.push(!ended[request.span]);
            if !ended[request.span] {
                let part = &mut self.parts[request.span];
                *part = Part { count: part.count + 1, stop: request.stop };
            }
        }
        self.rows.retain(&keep);
        let mut keep = keep.into_iter();
        self.requests.retain(|_| keep.next() == Some(true));
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

    /// The replies to each span, joined. Valid after the messages were written.
    pub fn replies(&self, rules: &Rules) -> Vec<Vec<u8>> {
        let mut replies: Vec<Vec<u8>> = Vec::new();
        replies.resize_with(self.parts.len(), Vec::new);
        for (number, (request, place)) in self.requests.iter().zip(self.rows.places()).enumerate() {
            let queue_id = self.rows.queue_of(number).map_or(0, |queue| self.rows.queues()[queue].id);
            let stored = crate::reply::Stored {
                opaque: request.opaque,
                queue_id,
                place: *place,
                unique: self.rows.text(&request.unique),
            };
            crate::reply::send(&mut replies[request.span], rules, &stored, request.binary);
        }
        replies
    }
}

/// A frame: its words, and the bytes of its header.
struct Frame<'a> {
    length: usize,
    encoding: u32,
    head: &'a [u8],
    body_at: usize,
}

impl<'a> Frame<'a> {
    /// The frame at the start of `bytes`. None if it is incomplete, or its lengths are inconsistent.
    fn of(bytes: &'a [u8]) -> Option<Frame<'a>> {
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

impl<'a> Single<'a> {
    /// Read a frame that is one ordinary JSON send of `code`, and append its properties to `arena`. None for others.
    ///
    /// `found` parses these properties. The limits of bodies and records are left to the caller.
    pub fn read(frame: &'a [u8], code: u16, arena: &mut Vec<u8>) -> Option<Single<'a>> {
        let Frame { length, encoding, head, body_at } = Frame::of(frame)?;
        if encoding != 0 || length != frame.len() || body_at == length {
            return None;
        }
        let header = send_in_json(head, code, arena)?;
        let stamp = Stamp { sys_flag: header.sys_flag, ..Stamp::default() };
        (stamp.is_ordinary() && header.properties.len() <= MAX_PROPERTIES).then_some(Single { header, body_at })
    }

    /// Parse the properties. None if they are not ordinary, or have no unique key.
    pub fn found<'t>(text: &'t str, rules: &Rules) -> Option<(&'t str, Found<'t>)> {
        let found = rules.names.ordinary(text)?;
        let unique = found.unique.filter(|unique| unique.len() <= LONGEST_UNIQUE)?;
        Some((unique, found))
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
        let round = Round::read(&frames, 310, &spans, 9, &rules, &hosts, limits);
        assert_eq!(round.parts.iter().map(|part| part.count).collect::<Vec<_>>(), [0, 0, 1]);
        let queues: Vec<&str> = round.rows.queues().iter().map(|queue| round.rows.text(&queue.topic)).collect();
        assert_eq!(queues, ["Orders"]);
    }
}
