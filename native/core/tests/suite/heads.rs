//! Records that units refer to, ordinary and damaged ones, compared with the layout.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use trimq_native_core::heads::{are_messages, Place};

use crate::config;

const MAGIC: u32 = 0xDAA3_20A7;

#[derive(Clone, Debug)]
struct One {
    body: usize,
    text: usize,
    /// Bytes of others in front of it.
    gap: usize,
}

fn ones() -> impl Strategy<Value = Vec<One>> {
    let one = (0..40usize, 0..300usize, prop_oneof![3 => Just(0), 1 => 1..90usize]);
    vec(one.prop_map(|(body, text, gap)| One { body, text, gap }), 1..6)
}

fn record(one: &One, queue: i32, offset: i64, physical: i64, topic: &[u8]) -> Vec<u8> {
    let size = 88 + one.body + topic.len() + 2 + one.text;
    let mut bytes = vec![7; size];
    bytes[..4].copy_from_slice(&(size as u32).to_be_bytes());
    bytes[4..8].copy_from_slice(&MAGIC.to_be_bytes());
    bytes[12..16].copy_from_slice(&queue.to_be_bytes());
    bytes[20..28].copy_from_slice(&offset.to_be_bytes());
    bytes[28..36].copy_from_slice(&physical.to_be_bytes());
    bytes[36..40].copy_from_slice(&0u32.to_be_bytes());
    bytes[84..88].copy_from_slice(&(one.body as u32).to_be_bytes());
    let behind = 88 + one.body;
    bytes[behind..behind + topic.len()].copy_from_slice(topic);
    let at = behind + topic.len();
    bytes[at..at + 2].copy_from_slice(&(one.text as u16).to_be_bytes());
    bytes
}

/// The log from `start` on, and the units.
fn made(ones: &[One], start: i64, queue: i32, first: i64, topic: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut log, mut units) = (Vec::new(), Vec::new());
    for (number, one) in ones.iter().enumerate() {
        log.resize(log.len() + one.gap, 0xEE);
        let physical = start + log.len() as i64;
        let bytes = record(one, queue, first + number as i64, physical, topic);
        units.extend(physical.to_be_bytes());
        units.extend((bytes.len() as u32).to_be_bytes());
        units.extend(5u64.to_be_bytes());
        log.extend(bytes);
    }
    (log, units)
}

/// Whether the check of a head covers this byte of a record: a change of any other byte is not detected.
fn is_checked(at: usize, one: &One, topic: &[u8]) -> bool {
    let behind = 88 + one.body;
    at < 8
        || (12..16).contains(&at)
        || (20..36).contains(&at)
        || (84..88).contains(&at)
        || (behind..behind + topic.len() + 2).contains(&at)
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn usual_records_are_the_messages(ones in ones(), start in 0..1_000_000i64, queue in 0..9, first in 0..99i64) {
        let (log, units) = made(&ones, start, queue, first, b"\x05Topic");
        let place = |queue_id, magic, topic| Place { queue_id, magic, topic };
        let usual = place(queue, MAGIC, &b"\x05Topic"[..]);
        prop_assert!(are_messages(&log, start, &units, first, &usual));
        prop_assert!(!are_messages(&log, start, &units, first + 1, &usual));
        prop_assert!(!are_messages(&log, start + 1, &units, first, &usual));
        prop_assert!(!are_messages(&log[..log.len() - 1], start, &units, first, &usual));
        prop_assert!(!are_messages(&log, start, &units[..units.len() - 1], first, &usual));
        prop_assert!(!are_messages(&log, start, &units, first, &place(queue + 1, MAGIC, b"\x05Topic")));
        prop_assert!(!are_messages(&log, start, &units, first, &place(queue, MAGIC + 4, b"\x05Topic")));
        prop_assert!(!are_messages(&log, start, &units, first, &place(queue, MAGIC, b"\x05Tapic")));
        prop_assert!(!are_messages(&log, start, &units, first, &place(queue, MAGIC, b"\x04Topi")));
    }

    #[test]
    fn a_bit_that_tells_something_is_seen(ones in ones(), which in any::<Index>(), at in any::<Index>(), bit in 0..8u8) {
        let topic = b"\x05Topic";
        let (mut log, units) = made(&ones, 50, 3, 9, topic);
        let number = which.index(ones.len());
        let one = &ones[number];
        let begin = i64::from_be_bytes(units[20 * number..20 * number + 8].try_into().unwrap()) as usize - 50;
        let at = at.index(88 + one.body + topic.len() + 2 + one.text);
        log[begin + at] ^= 1 << bit;
        let seen = is_checked(at, one, topic) || (at == 39 && (bit == 4 || bit == 5));
        prop_assert_eq!(are_messages(&log, 50, &units, 9, &Place { queue_id: 3, magic: MAGIC, topic }), !seen);
    }

    #[test]
    fn a_bit_of_a_unit_is_seen(ones in ones(), at in any::<Index>(), bit in 0..8u8) {
        let (log, mut units) = made(&ones, 50, 3, 9, b"\x05Topic");
        let at = at.index(units.len());
        units[at] ^= 1 << bit;
        let place = Place { queue_id: 3, magic: MAGIC, topic: b"\x05Topic" };
        prop_assert_eq!(are_messages(&log, 50, &units, 9, &place), at % 20 >= 12);
    }

    #[test]
    fn any_bytes(
        log in vec(any::<u8>(), 0..400),
        start in any::<i64>(),
        near in vec((prop_oneof![0..400i64, any::<i64>()], prop_oneof![0..400u32, any::<u32>()]), 0..5),
        tail in vec(any::<u8>(), 0..21),
        offset in prop_oneof![0..9i64, any::<i64>()],
    ) {
        let mut units = Vec::new();
        for (place, size) in near {
            units.extend(start.wrapping_add(place).to_be_bytes());
            units.extend(size.to_be_bytes());
            units.extend([0; 8]);
        }
        units.extend(tail);
        let is_none = units.is_empty();
        let place = Place { queue_id: 0, magic: MAGIC, topic: b"" };
        prop_assert_eq!(are_messages(&log, start, &units, offset, &place), is_none);
    }
}
