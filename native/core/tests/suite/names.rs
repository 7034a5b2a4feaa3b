//! Which properties are ordinary, by splitting their text; and hashes by their definitions.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use trimq_native_core::hash::{body_crc, Hash};
use trimq_native_core::rules::Found;

use crate::config;
use crate::frames::{usual_rules, FAST, NOT_IN_A_BATCH, PREFIXES, SLOW};
use crate::model::{crc, hash_code, index_hash};

/// Texts of names, values and separators in no order, and in the usual one.
pub fn any_text() -> impl Strategy<Value = String> {
    let names = ["UNIQ_KEY", "KEYS", "TAGS", "WAIT", "true", "false", "A1", "a b", "__x", "INNER_", "_", "ä", "😀"];
    let words = [&names[..], &SLOW, &FAST, &PREFIXES, &NOT_IN_A_BATCH].concat();
    let word = || prop_oneof![8 => select(words.clone()).prop_map(str::to_owned), 1 => "\\PC{0,4}"];
    let piece = (word(), word()).prop_map(|(name, value)| format!("{name}\x01{value}\x02"));
    let odd = prop_oneof![select(vec!["\x01", "\x02"]).prop_map(str::to_owned), word()];
    vec(prop_oneof![6 => piece, 1 => odd], 0..8).prop_map(|pieces| pieces.concat())
}

/// Name and value of each piece; None where one of them is missing.
fn pieces(text: &str) -> Option<Vec<(&str, &str)>> {
    let Some(text) = text.strip_suffix('\x02') else { return text.is_empty().then(Vec::new) };
    split(text)
}

fn split(text: &str) -> Option<Vec<(&str, &str)>> {
    text.split('\x02')
        .map(|piece| piece.split_once('\x01').filter(|(name, value)| !name.is_empty() && !value.is_empty()))
        .collect()
}

fn is_slow(name: &str) -> bool {
    SLOW.contains(&name) || (PREFIXES.iter().any(|prefix| name.starts_with(prefix)) && !FAST.contains(&name))
}

fn last<'a>(pieces: &[(&'a str, &'a str)], wanted: &str) -> Option<&'a str> {
    pieces.iter().rev().find(|(name, _)| *name == wanted).map(|(_, value)| *value)
}

fn found<'a>(pieces: &[(&'a str, &'a str)]) -> Found<'a> {
    Found { unique: last(pieces, "UNIQ_KEY"), keys: last(pieces, "KEYS"), tag: last(pieces, "TAGS") }
}

/// What is looked at in the text of a message in a batch; None where it is not ordinary.
pub fn in_batch(text: &str) -> Option<Found<'_>> {
    let closed = text.strip_suffix('\x02').unwrap_or(text);
    let pieces = if closed.is_empty() && closed == text { vec![] } else { split(closed)? };
    let is_fine = |name: &str| !is_slow(name) && !NOT_IN_A_BATCH.contains(&name);
    pieces.iter().all(|(name, _)| is_fine(name)).then(|| found(&pieces))
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn properties_of_a_send(text in any_text()) {
        let expected = pieces(&text).filter(|pieces| pieces.iter().all(|(name, value)| match *name {
            "UNIQ_KEY" => value.chars().all(|letter| letter.is_ascii_alphanumeric()),
            "WAIT" => *value == "true",
            name => !is_slow(name),
        }));
        prop_assert_eq!(usual_rules(true, 8, "").names.ordinary(&text), expected.map(|pieces| found(&pieces)));
    }

    #[test]
    fn properties_of_a_message_in_a_batch(text in any_text()) {
        let found = usual_rules(true, 8, "").names.ordinary_in_batch(&text).map(|found| format!("{found:?}"));
        prop_assert_eq!(found, in_batch(&text).map(|found| format!("{found:?}")));
    }

    /// Names that features have reserved are slow, also those that are looked at.
    #[test]
    fn a_known_name_can_be_reserved(name in select(vec!["UNIQ_KEY", "KEYS", "TAGS", "WAIT"]), other in any_text()) {
        let mut names = usual_rules(true, 8, "").names;
        names.slow.insert(name.as_bytes().to_vec());
        let text = format!("{name}\x01true\x02{other}");
        prop_assert_eq!(names.ordinary(&text), None);
        prop_assert_eq!(names.ordinary_in_batch(&text), None);
    }

    #[test]
    fn hashes_are_javas(topic in "\\PC{0,20}", key in any::<String>(), tail in "[a-z]{0,5}") {
        prop_assert_eq!(Hash::of(&key).value(), hash_code(&key));
        let front = Hash::of(&topic).then("#");
        prop_assert_eq!(front.then(&key).then(&tail).in_index(), index_hash(&topic, &(key + &tail)));
        prop_assert!(front.in_index() >= 0);
    }

    #[test]
    fn checksums_are_of_all_bytes(body in vec(any::<u8>(), 0..300)) {
        prop_assert_eq!(body_crc(&body), crc(&body));
    }
}

/// The one hash that has no absolute value, by a text that has it.
#[test]
fn a_key_of_the_smallest_hash() {
    let key = "polygenelubricants"; // known for this
    assert_eq!(hash_code(key), i32::MIN);
    assert_eq!(Hash::of(key).value(), i32::MIN);
    assert_eq!(Hash::of(key).in_index(), 0);
}
