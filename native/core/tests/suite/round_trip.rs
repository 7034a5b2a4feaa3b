//! Messages become frames, frames records and replies: all of it says the same.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use trimq_native_core::round::{Round, Served};
use trimq_native_core::rows::{Limits, Mismatch, Position, HEAD};
use trimq_native_core::rules::Rules;

use crate::config;
use crate::frames::{
    as_slices, code, hosts, laid_out, property, rules, send, sends_of, text_of, usual_rules, Buffer, Form, Send,
};
use crate::model::{crc, hash_code, index_hash, keys, records, units, Reader, Record, Unit};

/// Limits that no message of these tests is over.
pub const WIDE: Limits = Limits { body: usize::MAX, record: usize::MAX };
/// Where the log goes on, and the time.
pub const AT: Position = Position { physical_offset: (7 << 30) + 12_345, store_timestamp: 1_700_000_000_123 };

/// Write a round: the bytes of its records. Each queue begins at its place in `starts`.
pub fn written(
    round: &mut Round,
    buffer: &Buffer,
    rules: &Rules,
    hosts: &[&[u8]],
    starts: &[i64],
) -> Result<Vec<u8>, Mismatch> {
    let mut out = vec![0; round.rows.total()];
    let head = round.write(&buffer.bytes, &mut out, &AT, starts, rules, hosts)?;
    assert_eq!(&out[..HEAD.min(out.len())], &[0; HEAD][..HEAD.min(out.len())], "the head is the caller's to write");
    out[..HEAD].copy_from_slice(&head);
    Ok(out)
}

/// Topic and number of each queue, in their order.
pub fn queues(round: &Round) -> Vec<(String, i32)> {
    let rows = &round.rows;
    rows.queues().iter().map(|queue| (rows.text(&queue.topic).to_owned(), queue.id)).collect()
}

/// Where a queue begins, by its name.
pub fn start_of(queue: &(String, i32)) -> i64 {
    i64::from(hash_code(&queue.0)) + i64::from(i32::MAX) + i64::from(queue.1)
}

/// What becomes of sends that are all served, one after the other.
pub struct Expected {
    pub records: Vec<Record>,
    pub units: HashMap<(String, i32), Vec<Unit>>,
    pub hashes: Vec<i32>,
    pub keys: Vec<usize>,
    /// For each span, the content of its replies.
    pub replies: Vec<Vec<Reply>>,
}

/// The content of a reply.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub binary: bool,
    pub opaque: i32,
    pub fields: Vec<(String, String)>,
}

/// A message that is to be stored, and what its reply says.
pub struct Message {
    pub topic: String,
    pub queue_id: i32,
    pub body: Vec<u8>,
    pub properties: Vec<(String, String)>,
    pub flag: i32,
    pub sys_flag: i32,
    pub born_timestamp: i64,
    pub born_host: Vec<u8>,
    pub reconsume_times: i32,
    pub half: i64,
}

/// A request that is served.
pub struct Step {
    pub message: Option<Message>,
    pub opaque: i32,
    pub binary: bool,
    /// The queue that the reply names; None for one that names nothing.
    pub queue_id: Option<i32>,
    /// Whether there is a reply.
    pub oneway: bool,
}

/// The properties that all messages get.
pub fn added(rules: &Rules) -> Vec<(String, String)> {
    let text = std::str::from_utf8(&rules.added).expect("a text");
    let pairs = text.split('\x02').filter_map(|piece| piece.split_once('\x01'));
    pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// What a send becomes.
pub fn step(send: &Send, rules: &Rules, host: &[u8]) -> Step {
    let message = Message {
        topic: send.topic.clone(),
        queue_id: send.queue_id,
        body: send.body.clone(),
        properties: [send.properties.clone(), added(rules)].concat(),
        flag: send.flag,
        sys_flag: send.sys_flag,
        born_timestamp: send.born_timestamp,
        born_host: host.to_vec(),
        reconsume_times: send.reconsume_times.unwrap_or(0),
        half: 0,
    };
    let Send { opaque, queue_id, .. } = *send;
    Step { message: Some(message), opaque, binary: send.form.binary, queue_id: Some(queue_id), oneway: false }
}

/// What is expected of these sends of each connection.
pub fn expected(of_each: &[Vec<Send>], rules: &Rules, hosts: &[&[u8]]) -> Expected {
    let of_span = |(sends, host): (&Vec<Send>, &&[u8])| sends.iter().map(|send| step(send, rules, host)).collect();
    expected_of(&of_each.iter().zip(hosts).map(of_span).collect::<Vec<_>>(), rules)
}

/// What is expected of these requests of each connection.
pub fn expected_of(of_each: &[Vec<Step>], rules: &Rules) -> Expected {
    let mut found = Expected {
        records: Vec::new(),
        units: HashMap::new(),
        hashes: Vec::new(),
        keys: Vec::new(),
        replies: Vec::new(),
    };
    let mut at = AT.physical_offset;
    for steps in of_each {
        let mut replies = Vec::new();
        for step in steps {
            let mut fields = Vec::new();
            if let Some(message) = &step.message {
                let queue = (message.topic.clone(), message.queue_id);
                let begin = start_of(&queue);
                let own = found.units.entry(queue).or_default();
                let queue_offset = begin + own.len() as i64;
                let properties = text_of(&message.properties).into_bytes();
                let property_of = |name| property(&message.properties, name);
                let store_host = rules.store_host.clone();
                let hosts_size = message.born_host.len() + store_host.len();
                let size = 75 + hosts_size + message.body.len() + message.topic.len() + properties.len();
                let born_v6 = if message.born_host.len() == 20 { 0x10 } else { 0 };
                let store_v6 = if store_host.len() == 20 { 0x20 } else { 0 };
                let tag = property_of("TAGS");
                own.push((at, size, tag.map_or(0, |tag| hash_code(tag).into())));
                let words = keys(property_of("UNIQ_KEY"), property_of("KEYS"), tag, rules.tags);
                found.keys.push(words.len());
                found.hashes.extend(words.iter().map(|word| index_hash(&message.topic, word)));
                let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02X}")).collect::<String>();
                if let Some(queue_id) = step.queue_id {
                    fields = vec![
                        ("MSG_REGION", rules.reply.region.clone()),
                        ("TRACE_ON", rules.reply.trace.clone()),
                        ("msgId", hex(&rules.store_host) + &hex(&at.to_be_bytes())),
                        ("queueId", queue_id.to_string()),
                        ("queueOffset", queue_offset.to_string()),
                        ("transactionId", property_of("UNIQ_KEY").unwrap_or("").to_owned()),
                    ];
                }
                found.records.push(Record {
                    size,
                    magic: 0xDAA3_20A7,
                    body_crc: crc(&message.body),
                    queue_id: message.queue_id,
                    flag: message.flag,
                    queue_offset,
                    physical_offset: at,
                    sys_flag: message.sys_flag | born_v6 | store_v6,
                    born_timestamp: message.born_timestamp,
                    born_host: message.born_host.clone(),
                    store_timestamp: AT.store_timestamp,
                    store_host,
                    reconsume_times: message.reconsume_times,
                    prepared_transaction_offset: message.half,
                    body: message.body.clone(),
                    topic: message.topic.clone().into_bytes(),
                    properties,
                });
                at += size as i64;
            }
            if !step.oneway {
                replies.push(Reply {
                    binary: step.binary,
                    opaque: step.opaque,
                    fields: fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                });
            }
        }
        found.replies.push(replies);
    }
    found
}

/// The replies in a connection's bytes.
pub fn replies(bytes: &[u8]) -> Vec<Reply> {
    let mut reader = Reader(bytes);
    let mut found = Vec::new();
    while !reader.0.is_empty() {
        let total = reader.size(4);
        let encoding = reader.number(1);
        let length = reader.size(3);
        assert_eq!(total, length + 4, "a reply has no body");
        let head = reader.take(length);
        found.push(match encoding {
            0 => reply_in_json(&head),
            1 => reply_in_binary(&head),
            other => panic!("no encoding has the number {other}"),
        });
    }
    found
}

fn reply_in_json(head: &[u8]) -> Reply {
    let found: serde_json::Value = serde_json::from_slice(head).expect("a reply is JSON");
    let number = |name: &str| found[name].as_i64().expect("a number");
    let text = |value: &serde_json::Value| value.as_str().expect("a text").to_owned();
    assert_eq!((number("code"), number("flag"), number("version")), (0, 1, 479));
    assert_eq!((text(&found["language"]), text(&found["serializeTypeCurrentRPC"])), ("PYTHON".into(), "JSON".into()));
    let ext = found.get("extFields").map(|ext| ext.as_object().expect("fields"));
    assert_eq!(found.as_object().map(serde_json::Map::len), Some(6 + usize::from(ext.is_some())));
    assert!(ext.is_none_or(|ext| !ext.is_empty()));
    let fields = ext.into_iter().flatten();
    Reply {
        binary: false,
        opaque: number("opaque") as i32,
        fields: fields.map(|(name, value)| (name.clone(), text(value))).collect(),
    }
}

fn reply_in_binary(head: &[u8]) -> Reply {
    let mut reader = Reader(head);
    assert_eq!((reader.number(2), reader.number(1), reader.number(2)), (0, 9, 479), "code, language, version");
    let opaque = reader.number(4) as i32;
    assert_eq!((reader.number(4), reader.number(4)), (1, 0), "a reply without a remark");
    assert_eq!(reader.size(4), reader.0.len());
    let mut fields = Vec::new();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("a text");
    while !reader.0.is_empty() {
        let size = reader.size(2);
        let name = text(reader.take(size));
        let size = reader.size(4);
        fields.push((name, text(reader.take(size))));
    }
    Reply { binary: true, opaque, fields }
}

/// Look whether a round that has been written is what was expected.
pub fn assert_is(round: &Round, bytes: &[u8], rules: &Rules, expected: &Expected) {
    assert_eq!(records(bytes), expected.records);
    assert_eq!(round.rows.hashes(), expected.hashes);
    assert_eq!(round.rows.keys().collect::<Vec<_>>(), expected.keys);
    let mut left = round.rows.units();
    let mut met = 0;
    for (number, queue) in queues(round).into_iter().enumerate() {
        let of_queue = &expected.units[&queue];
        let (own, rest) = left.split_at(20 * of_queue.len());
        left = rest;
        met += 1;
        assert_eq!(&units(own), of_queue, "units of {queue:?}");
        let facts = &round.rows.queues()[number];
        assert_eq!(facts.count, of_queue.len());
        assert_eq!(facts.size, of_queue.iter().map(|unit| unit.1).sum::<usize>());
    }
    assert!(left.is_empty(), "units of no queue");
    assert_eq!(met, expected.units.len());
    for (number, (place, record)) in round.rows.places().iter().zip(&expected.records).enumerate() {
        assert_eq!((place.physical, place.in_queue), (record.physical_offset, record.queue_offset));
        assert_eq!(round.rows.size_of(number), record.size);
    }
    assert_eq!(round.rows.places().len(), expected.records.len());
    let found: Vec<_> = round.replies(rules).iter().map(|bytes| replies(bytes)).collect();
    assert_eq!(found, expected.replies);
}

fn connections() -> impl Strategy<Value = Vec<Vec<Send>>> {
    vec(vec(send(), 0..5), 1..5)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn what_was_sent_is_what_is_stored(
        of_each in connections(), code in code(), rules in rules(), gap in 0..9usize,
    ) {
        let buffer = laid_out(&of_each, code, gap);
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &sends_of(&[code]), &rules, &hosts, WIDE);
        for (part, (span, stops)) in round.parts.iter().zip(buffer.spans.iter().zip(&buffer.stops)) {
            prop_assert_eq!(part.count, stops.len());
            prop_assert_eq!(part.stop, span.place.end);
        }
        prop_assert_eq!(round.rows.len(), of_each.iter().map(Vec::len).sum::<usize>());
        prop_assert_eq!(round.parts.len(), of_each.len());
        if round.rows.is_empty() {
            let starts = vec![0; round.rows.queues().len()];
            prop_assert_eq!(round.write(&buffer.bytes, &mut [], &AT, &starts, &rules, &hosts), Err(Mismatch("queues or bytes")));
            return Ok(());
        }
        let starts: Vec<i64> = queues(&round).iter().map(start_of).collect();
        let bytes = written(&mut round, &buffer, &rules, &hosts, &starts).unwrap();
        assert_is(&round, &bytes, &rules, &expected(&of_each, &rules, &hosts));
    }

    #[test]
    fn no_more_than_asked_for_is_served(
        of_each in connections(), code in code(), most in 0..8usize, of_span in 0..4usize,
    ) {
        let rules = usual_rules(false, 8, "");
        let mut buffer = laid_out(&of_each, code, 3);
        for span in &mut buffer.spans {
            span.most = of_span;
        }
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let round = Round::read(&buffer.bytes, &buffer.spans, &Served { most, ..sends_of(&[code]) }, &rules, &hosts, WIDE);
        let mut left = most;
        for ((part, span), stops) in round.parts.iter().zip(&buffer.spans).zip(&buffer.stops) {
            let count = stops.len().min(of_span).min(left);
            left -= count;
            prop_assert_eq!(part.count, count);
            prop_assert_eq!(part.stop, count.checked_sub(1).map_or(span.place.start, |last| stops[last]));
        }
        let opaques: Vec<i32> = round.requests.iter().map(|request| request.opaque).collect();
        let all = of_each.iter().zip(&round.parts).flat_map(|(sends, part)| &sends[..part.count]);
        prop_assert_eq!(opaques, all.map(|send| send.opaque).collect::<Vec<_>>());
    }

    /// A message at a limit is served, and one over it is not, nor what stands behind it; others are.
    #[test]
    fn limits_are_those_of_the_log(send in send(), body in any::<bool>(), over in 0..2usize, v6 in any::<bool>()) {
        let rules = usual_rules(false, 8, "CLUSTER\x01c\x02");
        let mut send = send;
        send.body.extend(b"more than the small one's");
        send.properties.push(("longer".into(), "than the small one's".into()));
        let small = Send { body: b"b".to_vec(), properties: vec![("UNIQ_KEY".into(), "A".into())], ..send.clone() };
        let of_each = [vec![small.clone(), send.clone(), small.clone()], vec![small.clone()]];
        let buffer = laid_out(&of_each, 310, 0);
        let hosts = [vec![1; if v6 { 20 } else { 8 }], vec![2; 8]];
        let hosts = as_slices(&hosts);
        let size = 75 + hosts[0].len() + 8 + send.body.len() + send.topic.len() + send.text().len() + rules.added.len();
        let limits = if body {
            Limits { body: send.body.len() - over, record: usize::MAX }
        } else {
            Limits { body: usize::MAX, record: size - over }
        };
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &sends_of(&[310]), &rules, &hosts, limits);
        prop_assert_eq!(round.parts[0].count, if over == 0 { 3 } else { 1 });
        prop_assert_eq!(round.parts[1].count, 1);
        let kept = if over == 0 { of_each } else { [vec![small.clone()], vec![small]] };
        let starts: Vec<i64> = queues(&round).iter().map(start_of).collect();
        let bytes = written(&mut round, &buffer, &rules, &hosts, &starts).unwrap();
        assert_is(&round, &bytes, &rules, &expected(&kept, &rules, &hosts));
    }
}

fn plain(topic: &str, queue_id: i32, body: &[u8], text: &str) -> Send {
    Send {
        opaque: 7,
        topic: topic.into(),
        queue_id,
        sys_flag: 0,
        born_timestamp: 1,
        flag: 0,
        reconsume_times: None,
        properties: vec![("UNIQ_KEY".into(), text.into())],
        body: body.to_vec(),
        form: Form::plain(false),
    }
}

/// Properties take what a record has for them, with what is added, and no more.
#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn properties_over_their_limit_are_not_served() {
    let hosts = hosts(1);
    let hosts = as_slices(&hosts);
    for added in ["", "CLUSTER\x01c\x02"] {
        let rules = usual_rules(false, 8, added);
        for (over, count) in [(0, 1), (1, 0)] {
            let mut send = plain("Orders", 1, b"body", "A");
            let space = 32_767 - added.len() - send.text().len() - 3;
            send.properties.push(("p".into(), "v".repeat(space + over)));
            let buffer = laid_out(&[vec![send]], 310, 0);
            let round = Round::read(
                &buffer.bytes,
                &buffer.spans,
                &Served { most: 9, ..sends_of(&[310]) },
                &rules,
                &hosts,
                WIDE,
            );
            assert_eq!(round.parts[0].count, count, "{added:?} {over}");
        }
    }
}

#[test]
fn what_does_not_fit_together_is_said() {
    let rules = usual_rules(true, 8, "");
    let buffer = laid_out(&[vec![plain("Orders", 1, b"body", "A"), plain("Orders", 2, b"body", "B")]], 310, 0);
    let hosts = hosts(1);
    let hosts = as_slices(&hosts);
    let mut round =
        Round::read(&buffer.bytes, &buffer.spans, &Served { most: 9, ..sends_of(&[310]) }, &rules, &hosts, WIDE);
    let total = round.rows.total();
    for (starts, size) in [(1, total), (3, total), (2, total - 1), (2, total + 1), (2, 0)] {
        let found = round.write(&buffer.bytes, &mut vec![0; size], &AT, &vec![0; starts], &rules, &hosts);
        assert_eq!(found, Err(Mismatch("queues or bytes")));
    }
    let cut = round.write(&buffer.bytes[..80], &mut vec![0; total], &AT, &[0, 0], &rules, &hosts);
    assert_eq!(cut, Err(Mismatch("a body")));
    let strangers = round.write(&buffer.bytes, &mut vec![0; total], &AT, &[0, 0], &rules, &[]);
    assert_eq!(strangers, Err(Mismatch("a host")));
    assert!(round.write(&buffer.bytes, &mut vec![0; total], &AT, &[0, 0], &rules, &hosts).is_ok());
}
