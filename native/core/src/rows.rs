//! Messages to be written to the log: the sends of a round, or the messages of a batch.
//!
//! Messages are read first; then the caller gives the next offset of each queue; then they are written. Texts are
//! copied when they are read. Bodies stay in the receive buffer, which is passed again for writing.

use std::ops::Range;

use crate::halves::COMMIT;
use crate::hash::{body_crc, Hash};
use crate::rules::{Found, Rules, MAX_PROPERTIES};

/// Bytes of a record in addition to its body, topic, properties and hosts.
const AROUND: usize = 75;
/// The first bytes of the first record, which the caller writes last.
pub const HEAD: usize = 8;
/// Bytes of a unit of a consume queue.
pub const UNIT: usize = 20;
/// The magic number of a record whose topic has a length of one byte.
pub const MAGIC: u32 = 0xDAA3_20A7;
/// Longer topics need another magic number.
const LONGEST_TOPIC: usize = 127;
/// The flag of a record whose born host has 20 bytes instead of 8.
pub const BORN_HOST_V6: i32 = 0x10;
/// The same for its store host.
pub const STORE_HOST_V6: i32 = 0x20;
/// Bits of sysFlag that are only stored; a message with other bits is not served here.
const MEANINGLESS: i32 = 0x1 | 0x2 | 0x700;
/// Prefix of a tag that is a key of the index.
pub const TAG_KEY: &str = "T#";

/// Limits of messages, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The largest body (maxMessageSize).
    pub body: usize,
    /// The largest record.
    pub record: usize,
}

/// The fields of a message in addition to its body and its properties.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stamp {
    /// Flags of the user.
    pub flag: i32,
    /// Flags of the system.
    pub sys_flag: i32,
    /// When the producer created it, in ms.
    pub born_timestamp: i64,
    /// How often it was consumed.
    pub reconsume_times: i32,
    /// The index of its client's host.
    pub host: usize,
    /// For a commit record: the log offset of its half, which it names, as it says in its sysFlag that it is one.
    pub half: Option<i64>,
}

impl Stamp {
    /// Whether all flags of the system are only stored.
    pub fn is_ordinary(&self) -> bool {
        self.sys_flag & !MEANINGLESS == 0
    }
}

/// A queue that messages go to.
#[derive(Debug)]
pub struct Queue {
    /// The position of its topic in the texts.
    pub topic: Range<usize>,
    /// Its number.
    pub id: i32,
    /// The number of messages.
    pub count: usize,
    /// The total size of their records in bytes.
    pub size: usize,
    /// The hash of the topic and `#`, from which the index's hashes of its keys continue.
    front: Hash,
}

/// The parts of a message, before it is added.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// Its body: in the source, or if `in_texts` in the texts.
    pub body: Range<usize>,
    /// Whether its body is in the texts.
    pub in_texts: bool,
    /// Its properties.
    pub text: Range<usize>,
    /// Whether its properties are complete, so that none are appended.
    pub complete: bool,
    /// Its client's host in the texts, if it is not one of the context's.
    pub host: Option<Range<usize>>,
    /// Its other fields.
    pub stamp: Stamp,
}

#[derive(Debug)]
struct Message {
    queue: usize,
    draft: Draft,
    size: usize,
    tags_code: i32,
    keys: usize,
}

/// The place of a message in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its offset in the log.
    pub physical: i64,
    /// Its offset in its queue.
    pub in_queue: i64,
}

/// Messages, with their queues and keys.
#[derive(Debug, Default)]
pub struct Rows {
    /// Copied texts: properties and topics.
    pub texts: Vec<u8>,
    /// Whether properties are in the source, like the bodies, and not in the texts.
    texts_in_source: bool,
    messages: Vec<Message>,
    queues: Vec<Queue>,
    hashes: Vec<i32>,
    places: Vec<Place>,
    units: Vec<u8>,
    total: usize,
}

/// Arguments that do not match: a fault of the caller, never of a client.
#[derive(Debug, PartialEq, Eq)]
pub struct Mismatch(pub &'static str);

impl Draft {
    /// The properties that are appended to its own.
    fn added<'r>(&self, context: &Context<'_, 'r>) -> &'r [u8] {
        if self.complete || context.added == 0 {
            return &[];
        }
        &context.rules.added
    }
}

impl Rows {
    /// Rows whose properties are in the source.
    pub fn of_source() -> Rows {
        Rows { texts_in_source: true, ..Rows::default() }
    }

    /// The number of messages.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Whether there are no messages.
    pub fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// The total size of all records in bytes.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The queues, in the order of their first messages.
    pub fn queues(&self) -> &[Queue] {
        &self.queues
    }

    /// A part of the texts.
    pub fn text(&self, place: &Range<usize>) -> &str {
        self.texts.get(place.clone()).and_then(|raw| std::str::from_utf8(raw).ok()).unwrap_or("")
    }

    /// The index's hash of each key, in the order of the messages.
    pub fn hashes(&self) -> &[i32] {
        &self.hashes
    }

    /// The place of each message. Valid after `write`.
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The units of all messages, grouped by queue. Valid after `write`.
    pub fn units(&self) -> &[u8] {
        &self.units
    }

    /// The number of keys of each message.
    pub fn keys(&self) -> impl Iterator<Item = usize> + '_ {
        self.messages.iter().map(|message| message.keys)
    }

    /// The index of a message's queue in `queues`.
    pub fn queue_of(&self, message: usize) -> Option<usize> {
        Some(self.messages.get(message)?.queue)
    }

    /// The size of a message's record in bytes.
    pub fn size_of(&self, message: usize) -> usize {
        self.messages.get(message).map_or(0, |message| message.size)
    }

    /// Add a queue and return its index. None for a topic that these records cannot have, or an invalid id.
    pub fn add_queue(&mut self, topic: &str, id: i32) -> Option<usize> {
        if topic.is_empty() || topic.len() > LONGEST_TOPIC || id < 0 {
            return None;
        }
        let begin = self.texts.len();
        self.texts.extend_from_slice(topic.as_bytes());
        let front = Hash::of(topic).then("#");
        self.queues.push(Queue { topic: begin..self.texts.len(), id, count: 0, size: 0, front });
        Some(self.queues.len() - 1)
    }

    /// Remove the queue that was added last, which has no message.
    pub fn take_back_queue(&mut self) {
        if let Some(queue) = self.queues.pop() {
            self.texts.truncate(queue.topic.start);
        }
    }

    /// Add a message whose properties have been parsed. False if it exceeds a limit; then it was not added.
    pub fn add(&mut self, queue: usize, draft: Draft, found: &Found<'_>, context: &Context<'_, '_>) -> bool {
        let Some(to) = self.queues.get_mut(queue) else { return false };
        let Draft { body, stamp, .. } = &draft;
        let properties = draft.text.len() + draft.added(context).len();
        let born_host = match &draft.host {
            Some(place) => place.len(),
            None => context.hosts.get(stamp.host).map_or(0, |host| host.len()),
        };
        let hosts = born_host + context.rules.store_host.len();
        let size = AROUND + hosts + body.len() + to.topic.len() + properties;
        if body.is_empty()
            || body.len() > context.limits.body
            || size > context.limits.record
            || properties > MAX_PROPERTIES
            || !stamp.is_ordinary()
        {
            return false;
        }
        let before = self.hashes.len();
        let front = to.front;
        if let Some(unique) = found.unique {
            self.hashes.push(front.then(unique).in_index());
        }
        self.hashes.extend(found.words().map(|word| front.then(word).in_index()));
        let mut tags_code = 0;
        if let Some(tag) = found.tag {
            tags_code = Hash::of(tag).value();
            if context.rules.tags {
                self.hashes.push(front.then(TAG_KEY).then(tag).in_index());
            }
        }
        let keys = self.hashes.len() - before;
        to.count += 1;
        to.size += size;
        self.total += size;
        self.messages.push(Message { queue, draft, size, tags_code, keys });
        true
    }

    /// Retain the messages for which `keep` is true, and the queues that still have messages.
    pub fn retain(&mut self, keep: &[bool]) {
        let messages = std::mem::take(&mut self.messages);
        let hashes = std::mem::take(&mut self.hashes);
        for queue in &mut self.queues {
            queue.count = 0;
            queue.size = 0;
        }
        self.total = 0;
        let mut at = 0;
        for (number, message) in messages.into_iter().enumerate() {
            let own = at..at + message.keys;
            at = own.end;
            if keep.get(number) == Some(&true) {
                self.hashes.extend_from_slice(hashes.get(own).unwrap_or(&[]));
                self.total += message.size;
                self.queues[message.queue].count += 1;
                self.queues[message.queue].size += message.size;
                self.messages.push(message);
            }
        }
        let mut numbers = Vec::with_capacity(self.queues.len());
        let mut next = 0;
        for queue in &self.queues {
            numbers.push(next);
            next += usize::from(queue.count > 0);
        }
        self.queues.retain(|queue| queue.count > 0);
        for message in &mut self.messages {
            message.queue = numbers[message.queue];
        }
    }

    /// Write the records into `out`, except the first HEAD bytes, which are returned.
    ///
    /// The caller writes these last, so that a process killed midway leaves no valid-looking record. `starts` has the
    /// next offset of each queue. Units and places are valid afterwards.
    pub fn write(
        &mut self,
        source: &[u8],
        out: &mut [u8],
        at: &Position,
        starts: &[i64],
        context: &Context<'_, '_>,
    ) -> Result<[u8; HEAD], Mismatch> {
        if starts.len() != self.queues.len() || out.len() != self.total || self.messages.is_empty() {
            return Err(Mismatch("queues or bytes"));
        }
        let mut next = starts.to_vec();
        let mut unit_at = Vec::with_capacity(self.queues.len());
        let mut units = 0;
        for queue in &self.queues {
            unit_at.push(units);
            units += queue.count * UNIT;
        }
        self.units = vec![0; units];
        self.places = Vec::with_capacity(self.messages.len());
        let mut head = [0; HEAD];
        let mut begin = 0;
        for message in &self.messages {
            let queue = &self.queues[message.queue];
            let physical = at.physical_offset + begin as i64;
            let in_queue = next[message.queue];
            next[message.queue] += 1;
            let mut record = Pen { out: &mut out[begin..begin + message.size], at: HEAD };
            let draft = &message.draft;
            let bodies = if draft.in_texts { &self.texts } else { source };
            let body = bodies.get(draft.body.clone()).ok_or(Mismatch("a body"))?;
            let texts = if self.texts_in_source { source } else { &self.texts };
            let text = texts.get(draft.text.clone()).ok_or(Mismatch("properties"))?;
            let topic = self.texts.get(queue.topic.clone()).ok_or(Mismatch("a topic"))?;
            let stamp = &draft.stamp;
            let host = match &draft.host {
                Some(place) => self.texts.get(place.clone()),
                None => context.hosts.get(stamp.host).copied(),
            };
            let host = host.ok_or(Mismatch("a host"))?;
            let mut sys_flag = stamp.sys_flag | stamp.half.map_or(0, |_| COMMIT);
            if host.len() == 20 {
                sys_flag |= BORN_HOST_V6;
            }
            if context.rules.store_host.len() == 20 {
                sys_flag |= STORE_HOST_V6;
            }
            record.put(&body_crc(body).to_be_bytes());
            record.put(&queue.id.to_be_bytes());
            record.put(&stamp.flag.to_be_bytes());
            record.put(&in_queue.to_be_bytes());
            record.put(&physical.to_be_bytes());
            record.put(&sys_flag.to_be_bytes());
            record.put(&stamp.born_timestamp.to_be_bytes());
            record.put(host);
            record.put(&at.store_timestamp.to_be_bytes());
            record.put(&context.rules.store_host);
            record.put(&stamp.reconsume_times.to_be_bytes());
            record.put(&stamp.half.unwrap_or(0).to_be_bytes());
            record.put(&(body.len() as u32).to_be_bytes());
            record.put(body);
            record.put(&[topic.len() as u8]);
            record.put(topic);
            let added = draft.added(context);
            record.put(&((text.len() + added.len()) as u16).to_be_bytes());
            record.put(text);
            record.put(added);
            // `source` is passed a second time: other bytes than those that were read must not give a broken record.
            if record.at != message.size {
                return Err(Mismatch("a record's size"));
            }
            let front = [(message.size as u32).to_be_bytes(), MAGIC.to_be_bytes()].concat();
            if begin == 0 {
                head.copy_from_slice(&front);
            } else {
                out[begin..begin + HEAD].copy_from_slice(&front);
            }
            let mut unit = Pen { out: &mut self.units[unit_at[message.queue]..], at: 0 };
            unit.put(&physical.to_be_bytes());
            unit.put(&(message.size as u32).to_be_bytes());
            unit.put(&i64::from(message.tags_code).to_be_bytes());
            unit_at[message.queue] += UNIT;
            self.places.push(Place { physical, in_queue });
            begin += message.size;
        }
        Ok(head)
    }
}

/// The position of the first record, and the store timestamp.
#[derive(Clone, Copy, Debug)]
pub struct Position {
    /// The log offset of the first one.
    pub physical_offset: i64,
    /// The store timestamp of all records, in ms.
    pub store_timestamp: i64,
}

/// The values that the size and content of records depend on.
#[derive(Debug)]
pub struct Context<'a, 'r> {
    /// The rules for all messages.
    pub rules: &'r Rules,
    /// Bytes appended to the properties of each message: the length of `rules.added`, or 0 for batches.
    pub added: usize,
    /// The clients' hosts as encoded in records: 8 or 20 bytes each.
    pub hosts: &'a [&'a [u8]],
    /// The limits of messages.
    pub limits: Limits,
}

struct Pen<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Pen<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        self.out[self.at..end].copy_from_slice(bytes);
        self.at = end;
    }
}
