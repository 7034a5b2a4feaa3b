//! Halves of transactions: sends that become one, and halves in the log that are ended.
//!
//! The reference is protocol/transaction.py, with the checks of broker/processors/send/send_checks.py and
//! broker/processors/end_transaction.py. What is unusual is left to them.

use std::ops::Range;

use crate::hash::body_crc;
use crate::header::EndHeader;
use crate::rows::{BORN_HOST_V6, MAGIC, STORE_HOST_V6};
use crate::rules::{Found, Rules, MAX_PROPERTIES};

/// The kind of transaction in a sysFlag.
const KIND: i32 = 0xC;
/// The message is a half.
pub const PREPARED: i32 = 0x4;
/// The message is committed.
pub const COMMIT: i32 = 0x8;
/// The message is rolled back.
const ROLLBACK: i32 = 0xC;
/// Room for the properties that a half gets when it is stored again.
const FOR_LATER: usize = 128;
/// The most properties of a message that is read here: their names are compared with each other.
const MOST_PROPERTIES: usize = 32;
/// The bytes of a record before its born host.
const BEFORE_HOSTS: usize = 48;

/// What is known of the halves that may be ended.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pending<'a> {
    /// The records from log offset `start` on that may be read.
    pub log: &'a [u8],
    /// Where `log` starts.
    pub start: i64,
    /// The state of each half from queue offset `first` on: 0 for a pending one.
    pub states: &'a [u8],
    /// The queue offset of the first state.
    pub first: i64,
}

/// How a transaction is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct End {
    /// The offset of the half in its queue.
    pub offset: i64,
    /// The offset of the half in the log.
    pub physical: i64,
    /// Committed, or rolled back.
    pub commit: bool,
    /// Whether the client expects no reply.
    pub oneway: bool,
}

/// A half in the log.
#[derive(Debug)]
pub struct Half<'a> {
    /// The size of its record.
    pub size: usize,
    /// Its body.
    pub body: &'a [u8],
    /// Its properties.
    pub text: &'a str,
    /// Flags of the user.
    pub flag: i32,
    /// Flags of the system, without those of hosts and transactions.
    pub sys_flag: i32,
    /// When the producer created it, in ms.
    pub born_timestamp: i64,
    /// How often it was consumed.
    pub reconsume_times: i32,
    /// The host of its client as encoded in a record.
    pub born_host: &'a [u8],
}

/// The properties of a half in the log, and the text of its commit record's.
#[derive(Debug)]
pub struct Committed<'a> {
    /// The properties that the broker uses.
    pub found: Found<'a>,
    /// The topic that it is for.
    pub topic: &'a str,
    /// The queue that it is for.
    pub queue_id: i32,
    /// The properties of the commit record.
    pub text: String,
}

/// The properties of a send that is the half of a transaction, as it says in both ways. None for others.
pub fn sent<'t>(text: &'t str, sys_flag: i32, rules: &'t Rules) -> Option<Found<'t>> {
    let mut marked = false;
    let mut has_group = false;
    let mut met = Met::default();
    let found = rules.names.parse(text, |name, value| {
        met.first(name)?;
        has_group |= name == "PGROUP";
        if name != "TRAN_MSG" {
            return Some(false);
        }
        marked = true;
        (value == "true").then_some(true)
    })?;
    // the names that are appended must not be there before
    for name in rules.added_names().chain(["__transactionId__", "REAL_TOPIC", "REAL_QID"]) {
        met.first(name)?;
    }
    (marked && has_group && sys_flag & KIND == PREPARED).then_some(found)
}

/// Append what a half has after its own properties: those of `rules`, and its real topic and queue. False: too long.
pub fn append(
    texts: &mut Vec<u8>,
    own: &mut Range<usize>,
    unique: &str,
    topic: &str,
    queue_id: i32,
    rules: &Rules,
) -> bool {
    texts.truncate(own.end);
    texts.extend_from_slice(&rules.added);
    for (name, value) in [("__transactionId__", unique), ("REAL_TOPIC", topic)] {
        put(texts, name, value);
    }
    put(texts, "REAL_QID", &queue_id.to_string());
    own.end = texts.len();
    own.len() <= MAX_PROPERTIES - FOR_LATER
}

/// How a request ends its half. None if it does not, or not as clients write it.
pub fn end_of(header: &EndHeader<'_>) -> Option<End> {
    let commit = match header.state {
        COMMIT => true,
        ROLLBACK => false,
        _ => return None,
    };
    Some(End { offset: header.offset, physical: header.physical, commit, oneway: header.oneway })
}

impl<'a> Pending<'a> {
    /// The half that a request names, if it is pending, in `log`, and no record of more than `most` bytes.
    pub fn half(&self, header: &EndHeader<'_>, most: usize, rules: &Rules) -> Option<Half<'a>> {
        let state = usize::try_from(header.offset.checked_sub(self.first)?).ok()?;
        if *self.states.get(state)? != 0 {
            return None;
        }
        let at = usize::try_from(header.physical.checked_sub(self.start)?).ok()?;
        let record = self.log.get(at..)?;
        let record = record.get(..u32_at(record, 0)? as usize)?;
        let sys_flag = u32_at(record, 36)? as i32;
        let is_half = u32_at(record, 4)? == MAGIC
            && u32_at(record, 12)? == 0
            && i64_at(record, 20)? == header.offset
            && i64_at(record, 28)? == header.physical
            && sys_flag & KIND == 0
            && record.len() <= most;
        if !is_half {
            return None;
        }
        let mut fields = Fields { record, at: BEFORE_HOSTS };
        let born_host = fields.take(if sys_flag & BORN_HOST_V6 == 0 { 8 } else { 20 })?;
        fields.take(8)?; // when it was stored
        fields.take(if sys_flag & STORE_HOST_V6 == 0 { 8 } else { 20 })?;
        let reconsume_times = u32::from_be_bytes(fields.take(4)?.try_into().ok()?) as i32;
        fields.take(8)?;
        let size = u32::from_be_bytes(fields.take(4)?.try_into().ok()?) as usize;
        let body = fields.take(size)?;
        let size = usize::from(fields.take(1)?[0]);
        let topic = fields.take(size)?;
        let size = usize::from(u16::from_be_bytes(fields.take(2)?.try_into().ok()?));
        let text = fields.take(size)?;
        if fields.at != record.len() || topic != rules.half_topic.as_bytes() || body_crc(body) != u32_at(record, 8)? {
            return None;
        }
        Some(Half {
            size: record.len(),
            body,
            text: std::str::from_utf8(text).ok()?,
            flag: u32_at(record, 16)? as i32,
            sys_flag: sys_flag & !(BORN_HOST_V6 | STORE_HOST_V6),
            born_timestamp: i64_at(record, 40)?,
            reconsume_times,
            born_host,
        })
    }
}

impl<'a> Half<'a> {
    /// The properties of its commit record, if it is of `group` and has nothing unusual.
    pub fn committed(&self, group: &str, rules: &Rules) -> Option<Committed<'a>> {
        let (mut own_group, mut topic, mut queue_id) = (None, None, None);
        let mut met = Met::default();
        let mut text = String::with_capacity(self.text.len());
        let found = rules.names.parse(self.text, |name, value| {
            met.first(name)?;
            match name {
                "REAL_TOPIC" => {
                    topic = Some(value);
                    return Some(true);
                }
                "REAL_QID" => {
                    queue_id = Some(number(value)?);
                    return Some(true);
                }
                "PGROUP" => own_group = Some(value),
                _ => {}
            }
            for part in [name, "\x01", value, "\x02"] {
                text.push_str(part);
            }
            // the broker itself has added these to each message
            Some(name == "TRAN_MSG" || rules.added_names().any(|added| added == name))
        })?;
        let topic = topic?;
        (own_group == Some(group)).then_some(Committed { found, topic, queue_id: queue_id?, text })
    }
}

/// The names of a text so far.
#[derive(Default)]
struct Met<'t> {
    names: Vec<&'t str>,
}

impl<'t> Met<'t> {
    /// Note a name. None if it was there before, or there are too many to compare.
    fn first(&mut self, name: &'t str) -> Option<()> {
        let is_new = self.names.len() < MOST_PROPERTIES && !self.names.contains(&name);
        is_new.then(|| self.names.push(name))
    }
}

/// The number of a queue as brokers write it.
fn number(text: &str) -> Option<i32> {
    let is_plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    is_plain.then(|| text.parse().ok())?
}

fn put(texts: &mut Vec<u8>, name: &str, value: &str) {
    for part in [name, "\x01", value, "\x02"] {
        texts.extend_from_slice(part.as_bytes());
    }
}

/// The fields of a record from some position on.
struct Fields<'a> {
    record: &'a [u8],
    at: usize,
}

impl<'a> Fields<'a> {
    fn take(&mut self, size: usize) -> Option<&'a [u8]> {
        let end = self.at.checked_add(size)?;
        let taken = self.record.get(self.at..end)?;
        self.at = end;
        Some(taken)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn i64_at(bytes: &[u8], at: usize) -> Option<i64> {
    Some(i64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Names;

    const HALF: &str = "UNIQ_KEY\x01A\x02TRAN_MSG\x01true\x02PGROUP\x01g\x02";

    fn rules(added: &str) -> Rules {
        let set = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect();
        let names = Names {
            slow: set(&["TRAN_MSG", "REAL_TOPIC", "REAL_QID", "TRACE_ON", "DELAY"]),
            fast: set(&["__transactionId__"]),
            slow_prefixes: vec![b"__".to_vec()],
            ..Names::default()
        };
        Rules { names, added: added.into(), halves: true, half_topic: "H".into(), ..Rules::default() }
    }

    #[test]
    fn what_is_sent_says_in_both_ways_that_it_is_a_half() {
        let rules = rules("");
        let text = format!("{HALF}KEYS\x01k\x02TAGS\x01t\x02");
        let found = Found { unique: Some("A"), keys: Some("k"), tag: Some("t") };
        assert_eq!(sent(&text, PREPARED, &rules), Some(found));
        assert!(sent(&text, PREPARED | 0x103, &rules).is_some());
        for sys_flag in [0, 1, COMMIT, ROLLBACK] {
            assert_eq!(sent(&text, sys_flag, &rules), None);
        }
        for text in [
            HALF.replace("true", "false"),
            HALF.replace("TRAN_MSG\x01true\x02", ""),
            HALF.replace("PGROUP\x01g\x02", ""),
            HALF.repeat(2),
            format!("{HALF}TRAN_MSG\x01true\x02"),
            format!("{HALF}DELAY\x011\x02"),
            format!("{HALF}x"),
        ] {
            assert_eq!(sent(&text, PREPARED, &rules), None, "{text:?}");
        }
    }

    #[test]
    fn names_that_are_appended_must_be_new() {
        for name in ["__transactionId__", "REAL_TOPIC", "REAL_QID", "TRACE_ON", "CLUSTER"] {
            let text = format!("{HALF}{name}\x01v\x02");
            assert_eq!(sent(&text, PREPARED, &rules("TRACE_ON\x01true\x02CLUSTER\x01c\x02")), None, "{name}");
        }
        assert!(sent(&format!("{HALF}CLUSTER\x01v\x02"), PREPARED, &rules("")).is_some());
    }

    #[test]
    fn what_is_appended() {
        let mut texts = b"other".to_vec();
        texts.extend(HALF.as_bytes());
        texts.extend(b"left over");
        let mut own = 5..5 + HALF.len();
        assert!(append(&mut texts, &mut own, "A", "Orders", 12, &rules("TRACE_ON\x01true\x02")));
        let appended = "TRACE_ON\x01true\x02__transactionId__\x01A\x02REAL_TOPIC\x01Orders\x02REAL_QID\x0112\x02";
        assert_eq!(texts, format!("other{HALF}{appended}").into_bytes());
        assert_eq!(own, 5..texts.len());
    }

    #[test]
    fn a_half_leaves_room() {
        let appended = "__transactionId__|A|REAL_TOPIC|T|REAL_QID|1|".len();
        for (over, fits) in [(0, true), (1, false)] {
            let size = MAX_PROPERTIES - 128 - appended + over;
            let mut own = 0..size;
            assert_eq!(append(&mut vec![b'p'; size], &mut own, "A", "T", 1, &rules("")), fits);
        }
    }

    #[test]
    fn states_that_end_a_half() {
        let header = |state| EndHeader { state, offset: 7, physical: 9, oneway: true, ..EndHeader::default() };
        let end = |commit| End { offset: 7, physical: 9, commit, oneway: true };
        assert_eq!(end_of(&header(8)), Some(end(true)));
        assert_eq!(end_of(&header(12)), Some(end(false)));
        assert!([0, 4, 1, 16, 24, -8, i32::MIN].into_iter().all(|state| end_of(&header(state)).is_none()));
    }

    #[test]
    fn numbers_of_queues() {
        for (text, expected) in [("0", Some(0)), ("10", Some(10)), ("2147483647", Some(i32::MAX))] {
            assert_eq!(number(text), expected);
        }
        for text in ["", "00", "01", "+1", "-1", "2147483648", "1 ", "x", "\u{ff11}"] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }

    #[test]
    fn properties_of_a_commit_record() {
        let rules = rules("TRACE_ON\x01true\x02");
        let text = format!("REAL_QID\x013\x02{HALF}REAL_TOPIC\x01T\x02TRACE_ON\x01false\x02a\x01b\x01c\x02");
        fn of(text: &str) -> Half<'_> {
            let (size, flag, sys_flag, born_timestamp, reconsume_times) = (0, 0, 0, 0, 0);
            Half { size, body: b"b", text, flag, sys_flag, born_timestamp, reconsume_times, born_host: &[] }
        }
        let half = of(&text);
        let committed = half.committed("g", &rules).unwrap();
        assert_eq!((committed.topic, committed.queue_id, committed.found.unique), ("T", 3, Some("A")));
        assert_eq!(committed.text, format!("{HALF}TRACE_ON\x01false\x02a\x01b\x01c\x02"));
        assert!(half.committed("h", &rules).is_none() && half.committed("", &rules).is_none());
        for gone in ["REAL_QID\x013\x02", "REAL_TOPIC\x01T\x02", "PGROUP\x01g\x02"] {
            let other = text.replace(gone, "");
            assert!(of(&other).committed("g", &rules).is_none(), "{gone:?}");
        }
    }

    #[test]
    fn the_most_names() {
        let mut met = Met::default();
        let names: Vec<String> = (0..MOST_PROPERTIES).map(|number| number.to_string()).collect();
        assert!(names.iter().all(|name| met.first(name).is_some()));
        assert!(met.first("0").is_none() && met.first("new").is_none());
    }
}
