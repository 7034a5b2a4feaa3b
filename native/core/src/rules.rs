//! Rules given by the broker's configuration and features, and the texts that all replies share.

use memchr::{memchr, memchr2};
use rustc_hash::FxHashSet;

/// The most bytes of a record's properties.
pub const MAX_PROPERTIES: usize = 32_767;

/// Names of properties that decide about the fast path: see protocol/properties.toml.
#[derive(Debug, Default)]
pub struct Names {
    /// A message with one of these is not served here.
    pub slow: FxHashSet<Vec<u8>>,
    /// Names that start with a slow prefix and are not slow.
    pub fast: FxHashSet<Vec<u8>>,
    /// A message with a name that starts with one of these, and is not in `fast`, is not served here.
    pub slow_prefixes: Vec<Vec<u8>>,
    /// A message of a batch with one of these is not served here.
    pub not_in_a_batch: FxHashSet<Vec<u8>>,
}

impl Names {
    /// Whether a property of this name keeps a message from being served here.
    fn is_slow(&self, name: &[u8]) -> bool {
        self.slow.contains(name)
            || (self.slow_prefixes.iter().any(|prefix| name.starts_with(prefix)) && !self.fast.contains(name))
    }
}

/// The texts that all replies have in common.
#[derive(Debug, Default)]
pub struct ReplyTexts {
    /// `MSG_REGION`: printable ASCII without quotation marks and backslashes.
    pub region: String,
    /// `TRACE_ON`.
    pub trace: String,
    /// The broker's language, by name and by number.
    pub language: (String, u8),
    /// The broker's version.
    pub version: i32,
}

/// Everything that is the same for all messages.
#[derive(Debug, Default)]
pub struct Rules {
    /// Names of properties.
    pub names: Names,
    /// Appended to the properties of each message, except for messages of batches.
    pub added: Vec<u8>,
    /// Whether tags are keys of the index too.
    pub tags: bool,
    /// The broker's host as encoded in records: 8 or 20 bytes.
    pub store_host: Vec<u8>,
    /// Texts for replies.
    pub reply: ReplyTexts,
    /// The topic of half messages: sends to it are not served here.
    pub half_topic: String,
    /// Whether halves of transactions may be served here.
    pub halves: bool,
}

/// The properties of a message that the broker uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found<'a> {
    /// UNIQ_KEY.
    pub unique: Option<&'a str>,
    /// KEYS.
    pub keys: Option<&'a str>,
    /// TAGS.
    pub tag: Option<&'a str>,
}

impl<'a> Found<'a> {
    /// The words of KEYS.
    pub fn words(&self) -> impl Iterator<Item = &'a str> {
        self.keys.unwrap_or("").split(' ').filter(|word| !word.is_empty())
    }
}

impl Names {
    /// Parse the properties of a send: `name 0x01 value 0x02`, repeated. None if they are not ordinary.
    ///
    /// Of equal names the last one counts. The reference is property_text.ordinary.
    pub fn ordinary<'a>(&self, text: &'a str) -> Option<Found<'a>> {
        self.parse(text, |_, _| Some(false))
    }

    /// The same, except for the pairs for which `special` returns true. None also if it returns None.
    pub fn parse<'a>(
        &self,
        text: &'a str,
        mut special: impl FnMut(&'a str, &'a str) -> Option<bool>,
    ) -> Option<Found<'a>> {
        let mut found = Found::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (name, value, following) = pair(rest)?;
            let following = following?;
            if special(name, value)? {
                rest = following;
                continue;
            }
            match name {
                "UNIQ_KEY" | "KEYS" | "TAGS" | "WAIT" if self.slow.contains(name.as_bytes()) => return None,
                "UNIQ_KEY" if value.bytes().all(|byte| byte.is_ascii_alphanumeric()) => found.unique = Some(value),
                "KEYS" => found.keys = Some(value),
                "TAGS" => found.tag = Some(value),
                "WAIT" if value == "true" => {}
                "UNIQ_KEY" | "WAIT" => return None,
                _ if self.is_slow(name.as_bytes()) => return None,
                _ => {}
            }
            rest = following;
        }
        Some(found)
    }

    /// The same for a message of a batch, whose last separator may be missing.
    ///
    /// The reference is property_text.columns_of.
    pub fn ordinary_in_batch<'a>(&self, text: &'a str) -> Option<Found<'a>> {
        let mut found = Found::default();
        let mut rest = text;
        while !rest.is_empty() {
            let (name, value, following) = pair(rest)?;
            if self.not_in_a_batch.contains(name.as_bytes()) {
                return None;
            }
            match name {
                "UNIQ_KEY" | "KEYS" | "TAGS" if self.slow.contains(name.as_bytes()) => return None,
                "UNIQ_KEY" => found.unique = Some(value),
                "KEYS" => found.keys = Some(value),
                "TAGS" => found.tag = Some(value),
                _ if self.is_slow(name.as_bytes()) => return None,
                _ => {}
            }
            rest = following.unwrap_or("");
        }
        Some(found)
    }
}

impl Rules {
    /// The names of the properties in `added`.
    pub fn added_names(&self) -> impl Iterator<Item = &str> {
        let texts = std::str::from_utf8(&self.added).unwrap_or("").split('\x02');
        texts.filter_map(|text| text.split_once('\x01')).map(|(name, _)| name)
    }
}

/// The first name and value of a text, and the text after them, which is None if the last separator is missing.
fn pair(text: &str) -> Option<(&str, &str, Option<&str>)> {
    let name_end = memchr2(1, 2, text.as_bytes())?;
    let (name, rest) = text.split_at(name_end);
    let rest = rest.strip_prefix('\x01')?;
    let (value, following) = match memchr(2, rest.as_bytes()) {
        Some(end) => (&rest[..end], Some(&rest[end + 1..])),
        None => (rest, None),
    };
    (!name.is_empty() && !value.is_empty()).then_some((name, value, following))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        let set = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect();
        Names {
            slow: set(&["DELAY", "__CRC32#"]),
            fast: set(&["__SHARDINGKEY"]),
            slow_prefixes: vec![b"__".to_vec(), b"INNER_".to_vec()],
            not_in_a_batch: set(&["DELAY"]),
        }
    }

    #[test]
    fn of_equal_names_the_last_counts() {
        let found = names().ordinary("TAGS\x01a\x02UNIQ_KEY\x01U1\x02TAGS\x01b\x02").unwrap();
        assert_eq!(found, Found { unique: Some("U1"), keys: None, tag: Some("b") });
    }

    #[test]
    fn what_is_not_ordinary_is_refused() {
        for text in [
            "DELAY\x013\x02",
            "__x\x01y\x02",
            "INNER_y\x01z\x02",
            "WAIT\x01false\x02",
            "UNIQ_KEY\x01a-b\x02",
            "UNIQ_KEY\x01a",
            "\x01a\x02",
            "a\x01\x02",
            "a\x02",
            "a",
            "\x02",
        ] {
            assert_eq!(names().ordinary(text), None, "{text:?}");
        }
        for text in ["", "a\x01b\x01c\x02", "__SHARDINGKEY\x01s\x02", "WAIT\x01true\x02", "ä\x01ö\x02"] {
            assert!(names().ordinary(text).is_some(), "{text:?}");
        }
    }

    #[test]
    fn a_batch_may_leave_the_last_separator_out() {
        let found = names().ordinary_in_batch("KEYS\x01a b\x02UNIQ_KEY\x01x-y").unwrap();
        assert_eq!(found, Found { unique: Some("x-y"), keys: Some("a b"), tag: None });
        assert_eq!(names().ordinary_in_batch("DELAY\x011"), None);
    }
}
