//! Records of the log, as a slave gets them from its master, and as the dispatch reads them. The reference is
//! broker/store/log/log_scan.py, and for units and keys protocol/dispatch_rules.py; only ordinary records are read here.

use rustc_hash::FxHashMap;

use crate::halves::PREPARED;
use crate::hash::{body_crc, Hash};
use crate::rows::{BORN_HOST_V6, MAGIC, STORE_HOST_V6, TAG_KEY, UNIT};
use crate::tier::property;

/// Bytes of a record before its body, with IPv4 hosts.
const HEAD: usize = 88;
/// Bytes behind a record that a file must have left.
const BLANK: usize = 8;
/// Units of delayed messages have the time when they are due, and no tags code.
const SCHEDULE_TOPIC: &str = "SCHEDULE_TOPIC_XXXX";

/// An ordinary record: with IPv4 hosts and a topic whose length has one byte.
#[derive(Debug)]
struct Record<'a> {
    size: usize,
    queue_id: i32,
    queue_offset: i64,
    sys_flag: i32,
    stored: i64,
    topic: &'a str,
    properties: &'a str,
}

/// How far records were checked: their size in bytes, and the store time (ms) of the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// The size of all of them.
    pub size: usize,
    /// When the last one was stored; 0 without any.
    pub stored: i64,
}

/// A queue with new messages.
#[derive(Debug, PartialEq, Eq)]
pub struct Queue<'a> {
    /// Its topic.
    pub topic: &'a str,
    /// Its number.
    pub id: i32,
    /// The queue offset of its first message.
    pub start: i64,
    /// The units of its messages, which have consecutive offsets.
    pub units: Vec<u8>,
}

/// Keys of messages that were stored at the same time.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct KeyRun {
    /// The store time (ms).
    pub stored: i64,
    /// The index's hash of each key.
    pub hashes: Vec<i32>,
    /// The log offset of the message of each key.
    pub physical: Vec<i64>,
}

/// What adjacent records add to queues and index.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Dispatched<'a> {
    /// The records.
    pub checked: Checked,
    /// The log offset of each.
    pub offsets: Vec<i64>,
    /// Their queues, in the order of their first messages.
    pub queues: Vec<Queue<'a>>,
    /// Their keys, in their order.
    pub keys: Vec<KeyRun>,
}

/// Check the ordinary records at the start of `data`, which is at log offset `physical`, `room` bytes before the end
/// of its file. Ends before the first record that is incomplete, damaged, or not ordinary.
pub fn check(data: &[u8], physical: i64, room: usize) -> Checked {
    let mut found = Checked::default();
    while let Some(record) = ordinary(&data[found.size..], physical.wrapping_add(found.size as i64)) {
        let end = found.size + record.size;
        if end.saturating_add(BLANK) > room {
            break;
        }
        found = Checked { size: end, stored: record.stored };
    }
    found
}

/// Units and keys of the ordinary records at the start of `data`, which is at log offset `physical`.
///
/// With `tags`, tags are keys too. Ends before the first record that is not an ordinary one of a queue, that is of a topic
/// in `without`, or whose queue offset does not follow that of the message before it.
pub fn dispatch<'a>(data: &'a [u8], physical: i64, tags: bool, without: &[String]) -> Dispatched<'a> {
    let mut made = Dispatched::default();
    let mut known: FxHashMap<(&'a str, i32), (usize, Hash)> = FxHashMap::default();
    while let Some(record) = ordinary(&data[made.checked.size..], physical.wrapping_add(made.checked.size as i64)) {
        let place = physical.wrapping_add(made.checked.size as i64);
        if without.iter().any(|topic| topic == record.topic) || made.add(&record, place, tags, &mut known).is_none() {
            break;
        }
        made.offsets.push(place);
        made.checked = Checked { size: made.checked.size + record.size, stored: record.stored };
    }
    made
}

impl<'a> Dispatched<'a> {
    /// Add a record. None if Python has to dispatch it; then nothing has changed.
    fn add(
        &mut self,
        record: &Record<'a>,
        physical: i64,
        tags: bool,
        known: &mut FxHashMap<(&'a str, i32), (usize, Hash)>,
    ) -> Option<()> {
        // Halves and rollbacks are in no queue.
        if record.sys_flag & PREPARED != 0 || record.topic == SCHEDULE_TOPIC {
            return None;
        }
        let unique = property(record.properties, "\x02UNIQ_KEY\x01")?;
        let words = property(record.properties, "\x02KEYS\x01")?;
        let tag = property(record.properties, "\x02TAGS\x01")?;
        let name = (record.topic, record.queue_id);
        let (queue, front) = *known.entry(name).or_insert_with(|| {
            let Record { topic, queue_id: id, queue_offset: start, .. } = *record;
            self.queues.push(Queue { topic, id, start, units: Vec::new() });
            (self.queues.len() - 1, Hash::of(topic).then("#"))
        });
        let queue = &mut self.queues[queue];
        if queue.start.checked_add((queue.units.len() / UNIT) as i64) != Some(record.queue_offset) {
            return None;
        }
        queue.units.extend_from_slice(&physical.to_be_bytes());
        queue.units.extend_from_slice(&(record.size as u32).to_be_bytes());
        queue.units.extend_from_slice(&i64::from(Hash::of(tag).value()).to_be_bytes());
        if self.keys.last().is_none_or(|run| run.stored != record.stored) {
            self.keys.push(KeyRun { stored: record.stored, ..KeyRun::default() });
        }
        let run = self.keys.last_mut()?;
        let mut add = |hash: Hash| {
            run.hashes.push(hash.in_index());
            run.physical.push(physical);
        };
        if !unique.is_empty() {
            add(front.then(unique));
        }
        words.split(' ').filter(|word| !word.is_empty()).for_each(|word| add(front.then(word)));
        if tags && !tag.is_empty() {
            add(front.then(TAG_KEY).then(tag));
        }
        Some(())
    }
}

/// The whole record at the start of `bytes`, which is at log offset `physical`.
///
/// None if it is incomplete, damaged, or not ordinary. A sector that was never written reads as zeros: a record with
/// zeros in its topic or properties is left to Python.
fn ordinary(bytes: &[u8], physical: i64) -> Option<Record<'_>> {
    if bytes.len() < HEAD {
        return None;
    }
    let size = u32::from_be_bytes(array(bytes, 0)?) as usize;
    let sys_flag = i32_at(bytes, 36)?;
    if u32::from_be_bytes(array(bytes, 4)?) != MAGIC
        || i64_at(bytes, 28)? != physical
        || sys_flag & (BORN_HOST_V6 | STORE_HOST_V6) != 0
    {
        return None;
    }
    let record = bytes.get(..size)?;
    let topic_at = HEAD.checked_add(usize::try_from(i32_at(record, 84)?).ok()?)?;
    let body = record.get(HEAD..topic_at)?;
    let behind = record.get(topic_at..)?;
    let (length, behind) = behind.split_first()?;
    let (topic, behind) = behind.split_at_checked(usize::from(*length))?;
    let properties = behind.get(2..)?;
    if usize::from(u16::from_be_bytes(array(behind, 0)?)) != properties.len()
        || (!body.is_empty() && body_crc(body) != u32::from_be_bytes(array(record, 8)?))
        || memchr::memchr(0, topic).is_some()
        || memchr::memchr(0, properties).is_some()
    {
        return None;
    }
    let (topic, properties) = (std::str::from_utf8(topic).ok()?, std::str::from_utf8(properties).ok()?);
    let (queue_id, queue_offset, stored) = (i32_at(record, 12)?, i64_at(record, 20)?, i64_at(record, 56)?);
    let is_usual = !topic.is_empty() && queue_id >= 0 && queue_offset >= 0;
    is_usual.then_some(Record { size, queue_id, queue_offset, sys_flag, stored, topic, properties })
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    array(bytes, at).map(i32::from_be_bytes)
}

fn i64_at(bytes: &[u8], at: usize) -> Option<i64> {
    array(bytes, at).map(i64::from_be_bytes)
}
