//! Records of the log: ordinary ones are read whole, and of damaged or hostile bytes nothing that was not written so.

use proptest::prelude::*;
use trimq_native_core::log::{check, dispatch, Checked, KeyRun};

use crate::config;

const START: i64 = 5 << 30;
const FOREVER: usize = usize::MAX;

/// What a record is made of.
#[derive(Clone, Debug)]
struct One {
    topic: &'static str,
    queue_id: i32,
    body: Vec<u8>,
    tag: &'static str,
    keys: &'static str,
    stored: i64,
    sys_flag: i32,
}

fn one() -> impl Strategy<Value = One> {
    let flags = prop::sample::select(vec![0, 1, 8]);
    let bodies = prop::collection::vec(any::<u8>(), 0..20);
    let texts = (prop::sample::select(vec!["", "red"]), prop::sample::select(vec!["", "a", "a  b"]));
    (prop::sample::select(vec!["A", "Größe"]), 0..2, bodies, texts, 1..3_i64, flags).prop_map(
        |(topic, queue_id, body, (tag, keys), stored, sys_flag)| One {
            topic,
            queue_id,
            body,
            tag,
            keys,
            stored,
            sys_flag,
        },
    )
}

/// The hash of Java's String.
fn java(text: &str) -> i32 {
    text.encode_utf16().fold(0_i32, |hash, unit| hash.wrapping_mul(31).wrapping_add(i32::from(unit)))
}

/// The log of records, whose queue offsets count from 3 on.
fn log_of(ones: &[One]) -> Vec<u8> {
    let mut log = Vec::new();
    let mut offsets = std::collections::HashMap::new();
    for one in ones {
        let offset = offsets.entry((one.topic, one.queue_id)).or_insert(3_i64);
        let mut properties = String::new();
        for (name, value) in [("TAGS", one.tag), ("KEYS", one.keys)] {
            if !value.is_empty() {
                properties += &format!("{name}\x01{value}\x02");
            }
        }
        let size = 91 + one.body.len() + one.topic.len() + properties.len();
        let place = START + log.len() as i64;
        log.extend((size as u32).to_be_bytes());
        log.extend(0xDAA3_20A7_u32.to_be_bytes());
        log.extend((crc32fast::hash(&one.body) & 0x7FFF_FFFF).to_be_bytes());
        log.extend(one.queue_id.to_be_bytes());
        log.extend(0_i32.to_be_bytes());
        log.extend(offset.to_be_bytes());
        log.extend(place.to_be_bytes());
        log.extend(one.sys_flag.to_be_bytes());
        log.extend([0; 16]); // born time and host
        log.extend(one.stored.to_be_bytes());
        log.extend([0; 20]); // store host, reconsume times, prepared offset
        log.extend((one.body.len() as u32).to_be_bytes());
        log.extend(&one.body);
        log.push(one.topic.len() as u8);
        log.extend(one.topic.as_bytes());
        log.extend((properties.len() as u16).to_be_bytes());
        log.extend(properties.as_bytes());
        *offset += 1;
    }
    log
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn ordinary_records_are_read_whole(ones in prop::collection::vec(one(), 1..8), tags in any::<bool>()) {
        let log = log_of(&ones);
        let whole = Checked { size: log.len(), stored: ones.last().unwrap().stored };
        prop_assert_eq!(check(&log, START, FOREVER), whole);
        let made = dispatch(&log, START, tags, &[]);
        prop_assert_eq!(made.checked, whole);
        prop_assert_eq!(made.offsets.len(), ones.len());
        let codes: Vec<i64> = ones.iter().map(|one| i64::from(java(one.tag))).collect();
        let mut seen = 0;
        for queue in &made.queues {
            prop_assert_eq!(queue.start, 3);
            let own = ones.iter().enumerate().filter(|(_, one)| (one.topic, one.queue_id) == (queue.topic, queue.id));
            let units: Vec<u8> = own
                .flat_map(|(number, _)| {
                    let end = made.offsets.get(number + 1).copied().unwrap_or(START + log.len() as i64);
                    let size = (end - made.offsets[number]) as u32;
                    [&made.offsets[number].to_be_bytes()[..], &size.to_be_bytes(), &codes[number].to_be_bytes()].concat()
                })
                .collect();
            prop_assert_eq!(&queue.units, &units);
            seen += units.len() / 20;
        }
        prop_assert_eq!(seen, ones.len());
        let hash = |text: String| java(&text).checked_abs().unwrap_or(0);
        let mut keys: Vec<(i64, i32, i64)> = Vec::new();
        for (one, place) in ones.iter().zip(&made.offsets) {
            let words = one.keys.split(' ').filter(|word| !word.is_empty());
            keys.extend(words.map(|word| (one.stored, hash(format!("{}#{word}", one.topic)), *place)));
            if tags && !one.tag.is_empty() {
                keys.push((one.stored, hash(format!("{}#T#{}", one.topic, one.tag)), *place));
            }
        }
        let rows = |run: &KeyRun| -> Vec<(i64, i32, i64)> {
            run.hashes.iter().zip(&run.physical).map(|(hash, place)| (run.stored, *hash, *place)).collect()
        };
        prop_assert_eq!(made.keys.iter().flat_map(rows).collect::<Vec<_>>(), keys);
    }

    #[test]
    fn a_cut_or_changed_log_is_read_up_to_a_record(
        ones in prop::collection::vec(one(), 0..6),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in 0..40_usize,
        room in 0..1200_usize,
    ) {
        let mut log = log_of(&ones);
        let ends: Vec<usize> = (0..=ones.len()).map(|count| log_of(&ones[..count]).len()).collect();
        let changed = (!log.is_empty()).then(|| at.index(log.len()));
        if let Some(changed) = changed {
            log[changed] = byte;
        }
        log.truncate(log.len().saturating_sub(cut));
        let found = check(&log, START, room);
        prop_assert!(ends.contains(&found.size) && found.size <= log.len());
        prop_assert!(found.size == 0 || found.size + 8 <= room);
        prop_assert!(dispatch(&log, START, false, &[]).checked.size <= check(&log, START, FOREVER).size);
    }

    #[test]
    fn topics_may_be_left_out(ones in prop::collection::vec(one(), 1..8)) {
        let log = log_of(&ones);
        let before = ones.iter().position(|one| one.topic == "A").unwrap_or(ones.len());
        prop_assert_eq!(dispatch(&log, START, false, &["A".to_owned()]).offsets.len(), before);
    }

    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..300), at in any::<i64>(), room in any::<usize>()) {
        check(&bytes, at, room);
        dispatch(&bytes, at, true, &[]);
    }
}
