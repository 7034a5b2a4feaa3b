//! Batches: bodies in, the same messages out.

use proptest::collection::vec;
use proptest::prelude::*;
use trimq_native_core::batch;
use trimq_native_core::round::Round;
use trimq_native_core::rows::{Context, Limits, Rows, Stamp, HEAD};
use trimq_native_core::rules::Rules;

use crate::config;
use crate::frames::{properties, property, rules, text_of, topic, usual_rules};
use crate::model::{crc, hash_code, index_hash, keys, records, units};
use crate::names::in_batch;
use crate::round_trip::{AT, WIDE};

/// A message of a batch.
#[derive(Clone, Debug)]
pub struct Message {
    pub flag: i32,
    pub body: Vec<u8>,
    pub properties: Vec<(String, String)>,
    /// The last separator is left out.
    pub open: bool,
}

impl Message {
    /// The text of its properties.
    pub fn text(&self) -> String {
        let mut text = text_of(&self.properties);
        if self.open {
            text.pop();
        }
        text
    }
}

/// The body of a batch.
pub fn body_of(messages: &[Message]) -> Vec<u8> {
    let mut body = Vec::new();
    for message in messages {
        let text = message.text();
        body.extend((22 + message.body.len() as u32 + text.len() as u32).to_be_bytes());
        body.extend([0; 8]);
        body.extend(message.flag.to_be_bytes());
        body.extend((message.body.len() as u32).to_be_bytes());
        body.extend(&message.body);
        body.extend((text.len() as u16).to_be_bytes());
        body.extend(text.as_bytes());
    }
    body
}

/// Messages that are to be served.
pub fn message() -> impl Strategy<Value = Message> {
    let few = prop_oneof![4 => properties(), 1 => Just(Vec::new())];
    (any::<i32>(), vec(any::<u8>(), 1..60), few, any::<bool>()).prop_map(|(flag, body, properties, open)| Message {
        flag,
        body,
        open: open && !properties.is_empty(),
        properties,
    })
}

/// Whether a body is a batch of ordinary messages: taken apart with numbers that cannot overflow.
pub fn is_ordinary(body: &[u8], most: usize) -> bool {
    let int = |at: usize| body.get(at..at + 4).map(|raw| i128::from(i32::from_be_bytes(raw.try_into().unwrap())));
    let mut at = 0;
    while at < body.len() {
        let (Some(size), Some(length)) = (int(at), int(at + 16)) else { return false };
        let Ok(length) = usize::try_from(length) else { return false };
        let text_at = at + 22 + length;
        let Some(raw) = body.get(text_at - 2..text_at) else { return false };
        let text_length = i16::from_be_bytes(raw.try_into().unwrap());
        let is_size = size == 22 + length as i128 + i128::from(text_length);
        let text = usize::try_from(text_length).ok().and_then(|length| body.get(text_at..text_at + length));
        let Some(text) = text.and_then(|raw| std::str::from_utf8(raw).ok()) else { return false };
        if !is_size || length == 0 || length > most || in_batch(text).is_none() {
            return false;
        }
        at = text_at + text.len();
    }
    !body.is_empty()
}

const STAMP: Stamp = Stamp { flag: 0, sys_flag: 0x101, born_timestamp: -5, reconsume_times: 3, host: 0, half: None };

fn read(body: &[u8], topic: &str, rules: &Rules, host: &[u8], limits: Limits) -> Option<Rows> {
    batch::read(body, topic, 6, STAMP, rules, &[host], limits)
}

fn written(rows: &mut Rows, body: &[u8], rules: &Rules, host: &[u8]) -> Vec<u8> {
    let mut out = vec![0; rows.total()];
    let context = Context { rules, added: 0, hosts: &[host], limits: WIDE };
    let head = rows.write(body, &mut out, &AT, &[40], &context).unwrap();
    out[..HEAD].copy_from_slice(&head);
    out
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn what_was_sent_is_what_is_stored(
        messages in vec(message(), 1..8), topic in topic(), rules in rules(), v6 in any::<bool>(),
    ) {
        let body = body_of(&messages);
        let host = vec![9; if v6 { 20 } else { 8 }];
        let mut rows = read(&body, &topic, &rules, &host, WIDE).expect("ordinary messages");
        let bytes = written(&mut rows, &body, &rules, &host);
        let stored = records(&bytes);
        prop_assert_eq!(stored.len(), messages.len());
        let mut hashes = Vec::new();
        let mut at = AT.physical_offset;
        let units = units(rows.units());
        prop_assert_eq!(units.len(), messages.len());
        for (number, (record, message)) in stored.iter().zip(&messages).enumerate() {
            let tag = property(&message.properties, "TAGS");
            let words = keys(property(&message.properties, "UNIQ_KEY"), property(&message.properties, "KEYS"), tag, rules.tags);
            hashes.extend(words.iter().map(|word| index_hash(&topic, word)));
            let v6 = if v6 { 0x10 } else { 0 } | if rules.store_host.len() == 20 { 0x20 } else { 0 };
            let text = message.text();
            prop_assert_eq!(&record.body, &message.body);
            prop_assert_eq!(record.properties.as_slice(), text.as_bytes()); // nothing is added to them
            prop_assert_eq!(record.topic.as_slice(), topic.as_bytes());
            prop_assert_eq!((record.body_crc, record.flag), (crc(&message.body), message.flag));
            prop_assert_eq!((record.queue_id, record.queue_offset), (6, 40 + number as i64));
            prop_assert_eq!((record.physical_offset, record.store_timestamp), (at, AT.store_timestamp));
            prop_assert_eq!((record.born_timestamp, record.reconsume_times), (-5, 3));
            prop_assert_eq!((record.sys_flag, record.prepared_transaction_offset), (0x101 | v6, 0));
            prop_assert_eq!((&record.born_host, &record.store_host), (&host, &rules.store_host));
            prop_assert_eq!(units[number], (at, record.size, tag.map_or(0, |tag| hash_code(tag).into())));
            at += record.size as i64;
        }
        prop_assert_eq!(rows.hashes(), hashes);
        prop_assert_eq!(rows.queues().len(), 1);
        let round = Round::of_batch(rows);
        prop_assert!(round.requests.is_empty() && round.parts.is_empty());
    }

    /// One message that is not ordinary, or lengths that do not add up, and nothing of the batch is served.
    #[test]
    fn all_of_it_or_nothing(
        messages in vec(message(), 1..5), at in any::<prop::sample::Index>(), what in 0..8usize, by in 1..40i32,
    ) {
        let rules = usual_rules(false, 8, "");
        let at = at.index(messages.len());
        let mut messages = messages;
        let mut limits = WIDE;
        let before = body_of(&messages[..at]).len();
        let mut body = body_of(&messages);
        let mut change = |place: usize, by: i32| {
            let number = i32::from_be_bytes(body[place..place + 4].try_into().unwrap());
            body[place..place + 4].copy_from_slice(&number.wrapping_add(by).to_be_bytes());
        };
        match what {
            0 => change(before, by),
            1 => change(before, -by),
            2 => change(before + 16, by),
            3 => change(before + 16, i32::MIN),
            4 => body.truncate(body.len() - (by as usize).min(body.len() - before - 1)),
            5 => body.extend(vec![0; (by as usize).min(19)]),
            6 => {
                messages[at].properties.push(("DELAY".into(), "1".into()));
                messages[at].open = false;
                body = body_of(&messages);
            }
            _ => {
                messages[at].body = vec![1; 61];
                body = body_of(&messages);
                limits = Limits { body: 60, record: usize::MAX };
            }
        }
        prop_assert_eq!(read(&body, "T", &rules, &[1; 8], limits).is_some(), is_ordinary(&body, limits.body));
    }
}

#[test]
fn what_no_batch_is() {
    let rules = usual_rules(false, 8, "");
    let good = Message { flag: 0, body: b"b".to_vec(), properties: vec![], open: false };
    let body = body_of(std::slice::from_ref(&good));
    assert!(read(&body, "T", &rules, &[1; 8], WIDE).is_some());
    assert!(read(&body, &"T".repeat(127), &rules, &[1; 8], WIDE).is_some());
    for topic in ["", &"T".repeat(128)] {
        assert!(read(&body, topic, &rules, &[1; 8], WIDE).is_none());
    }
    assert!(batch::read(&body, "T", -1, STAMP, &rules, &[&[1; 8]], WIDE).is_none());
    assert!(read(b"", "T", &rules, &[1; 8], WIDE).is_none());
    assert!(read(&body_of(&[Message { body: vec![], ..good }]), "T", &rules, &[1; 8], WIDE).is_none());
    let slow = Stamp { sys_flag: 4, ..STAMP };
    assert!(batch::read(&body, "T", 6, slow, &rules, &[&[1; 8]], WIDE).is_none());
    for sys_flag in (0..32).map(|bit| 1 << bit) {
        let stamp = Stamp { sys_flag, ..STAMP };
        let meaningless = [0x1, 0x2, 0x100, 0x200, 0x400].contains(&sys_flag);
        assert_eq!(batch::read(&body, "T", 6, stamp, &rules, &[&[1; 8]], WIDE).is_some(), meaningless, "{sys_flag:#x}");
    }
    // texts that are no UTF-8
    let raw = [&[0, 0, 0, 27][..], &[0; 8], &[0; 4], &[0, 0, 0, 1], b"b", &[0, 4], b"a\x01\xff\x02"].concat();
    assert!(read(&raw, "T", &rules, &[1; 8], WIDE).is_none());
}
