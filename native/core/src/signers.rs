//! Signatures of requests: which user has signed a frame.
//!
//! `Signature = base64(HMAC-SHA1(secret, values of the ext fields in the order of their names + body))`, as in
//! protocol/auth/signature.py. A user is named only for a header whose fields can be read in one way: with repeated
//! names, names that are not ASCII or invalid escapes there is none, and the Python code decides about the request.

use std::ops::Range;

use hmac::{Hmac, Mac};
use rustc_hash::FxHashMap;
use sha1::Sha1;
use subtle::ConstantTimeEq;

use crate::header::{code_of, in_binary, in_json, unescape, Envelope, Fields, Value};
use crate::round::{Frame, Part, Span};
use crate::stamp::Stamp;

const ACCESS_KEY: &str = "AccessKey";
const SIGNATURE: &str = "Signature";
const UNIQUE_KEY_QUERY: &str = "_UNIQUE_KEY_QUERY";
/// Clients up to this version add `_UNIQUE_KEY_QUERY` after they have signed.
const LAST_UNSIGNED_QUERY: i32 = 393;
/// Requests with more ext fields, which no client makes, are left.
const MOST_FIELDS: usize = 64;

/// The users whose signatures are known, and what is read of their requests.
pub struct Signers {
    numbers: FxHashMap<Box<str>, usize>,
    /// The HMAC of each user's secret, before any content: a copy of it costs half as much as a new one.
    macs: Vec<Hmac<Sha1>>,
    /// Whether each user's requests are left to the Python code unless they have a stamp.
    need_stamps: Vec<bool>,
    /// Of no user: so that an unknown name takes as long as a wrong signature.
    unknown: Hmac<Sha1>,
    topics: Vec<(u16, String)>,
    mark: Vec<u8>,
}

/// What a user asks for in a frame that he has signed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked<'a> {
    /// The number of the user.
    pub user: usize,
    /// The request code.
    pub code: u16,
    /// The topic, if the frame names one.
    pub topic: Option<&'a str>,
}

/// A frame with a stamp, at the start of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamped {
    /// The number of the user.
    pub user: usize,
    /// The request code.
    pub code: u16,
    /// Its stamp.
    pub stamp: Stamp,
    /// The frames before it.
    pub before: Part,
}

/// The signed frames at the start of a span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked<'a> {
    /// How many there are, and where the last of them ends.
    pub part: Part,
    /// What is asked for, each once, and how far the frames before the first one with it go.
    pub asked: Vec<(Asked<'a>, Part)>,
    /// Those of the frames that have a stamp.
    pub stamped: Vec<Stamped>,
}

impl Signers {
    /// No users. `topics`: the codes of the frames that may be read, and the field of each that names its topic. `mark`: the
    /// signed text of requests with a stamp begins so; empty if there are none. One that cannot be read is left.
    ///
    /// `unknown` is a secret that no user has: random bytes.
    pub fn new(topics: Vec<(u16, String)>, mark: Vec<u8>, unknown: &[u8]) -> Signers {
        Signers {
            numbers: FxHashMap::default(),
            macs: vec![],
            need_stamps: vec![],
            unknown: mac_of(unknown),
            topics,
            mark,
        }
    }

    /// Add a user, who must not be known yet, and return the number. `needs_stamp`: requests without one are left.
    pub fn add(&mut self, name: &str, secret: &[u8], needs_stamp: bool) -> usize {
        self.numbers.insert(name.into(), self.macs.len());
        self.macs.push(mac_of(secret));
        self.need_stamps.push(needs_stamp);
        self.macs.len() - 1
    }

    /// The user who has signed a request with this JSON header, and its stamp, if it has one.
    pub fn signer(&self, head: &[u8], body: &[u8]) -> Option<(usize, Option<Stamp>)> {
        let code = code_of(head, 0)?;
        let mut ext = Signed::of(self, None);
        let mut arena = Vec::new();
        let envelope = in_json(head, code, &mut ext, &mut arena)?;
        ext.signer(&envelope, &arena, body)
    }

    /// The same for a frame whose code may be read, and what it asks for.
    pub fn asked<'a>(&self, frame: &'a [u8]) -> Option<(Asked<'a>, Option<Stamp>)> {
        let read = Frame::of(frame).filter(|read| read.length == frame.len())?;
        self.of(&read, frame)
    }

    fn of<'a>(&self, read: &Frame<'a>, frame: &'a [u8]) -> Option<(Asked<'a>, Option<Stamp>)> {
        let code = code_of(read.head, read.encoding)?;
        let (_, field) = self.topics.iter().find(|(known, _)| *known == code)?;
        let mut ext = Signed::of(self, Some(field));
        let mut arena = Vec::new();
        let envelope = match read.encoding {
            0 => in_json(read.head, code, &mut ext, &mut arena)?,
            _ => in_binary(read.head, code, &mut ext, &mut arena)?,
        };
        let topic = ext.topic;
        let (user, stamp) = ext.signer(&envelope, &arena, frame.get(read.body_at..read.length)?)?;
        Some((Asked { user, code, topic }, stamp))
    }

    /// The signed frames at the start of each span, at most `most` in all.
    pub fn round<'a>(&self, frames: &'a [u8], spans: &[Span], most: usize) -> Vec<Checked<'a>> {
        let mut rest = most;
        let checked = spans.iter().map(|span| {
            let mut part = Part { count: 0, stop: span.place.start };
            let mut asked: Vec<(Asked<'a>, Part)> = Vec::new();
            let mut stamped = Vec::new();
            while part.count < span.most && rest > 0 {
                let Some(bytes) = frames.get(part.stop..span.place.end) else { break };
                let Some(frame) = Frame::of(bytes) else { break };
                let Some((found, stamp)) = self.of(&frame, bytes) else { break };
                // Most connections have one user who sends to one topic: the last entry is the usual one.
                if !asked.iter().rev().any(|(known, _)| *known == found) {
                    asked.push((found, part));
                }
                if let Some(stamp) = stamp {
                    stamped.push(Stamped { user: found.user, code: found.code, stamp, before: part });
                }
                part = Part { count: part.count + 1, stop: part.stop + frame.length };
                rest -= 1;
            }
            Checked { part, asked, stamped }
        });
        checked.collect()
    }
}

/// The ext fields of a request that are signed.
struct Signed<'a, 's> {
    signers: &'s Signers,
    fields: Vec<(&'a str, Text<'a>)>,
    topic_field: Option<&'s str>,
    topic: Option<&'a str>,
}

enum Text<'a> {
    Plain(&'a str),
    /// The position of the unescaped text in the arena.
    Unescaped(Range<usize>),
}

impl<'a> Fields<'a> for Signed<'a, '_> {
    fn take(&mut self, name: &'a str, value: Value<'a>, arena: &mut Vec<u8>) -> Option<()> {
        if self.fields.len() == MOST_FIELDS || !name.is_ascii() {
            return None;
        }
        if self.topic_field == Some(name) {
            self.topic = Some(value.text()?);
        }
        let text = match value {
            // As Python: a number or a boolean is signed as its text.
            Value::Text(text) | Value::Bare(text) => Text::Plain(text),
            Value::Escaped(raw) => {
                let begin = arena.len();
                unescape(raw, arena)?;
                Text::Unescaped(begin..arena.len())
            }
        };
        self.fields.push((name, text));
        Some(())
    }
}

impl<'a, 's> Signed<'a, 's> {
    fn of(signers: &'s Signers, topic_field: Option<&'s str>) -> Self {
        Signed { signers, fields: Vec::with_capacity(20), topic_field, topic: None }
    }

    /// The number of the user whose signature this is, and the stamp.
    fn signer(mut self, envelope: &Envelope, arena: &[u8], body: &[u8]) -> Option<(usize, Option<Stamp>)> {
        self.fields.sort_unstable_by_key(|(name, _)| *name);
        if self.fields.windows(2).any(|two| two[0].0 == two[1].0) {
            return None;
        }
        let Text::Plain(name) = self.value(ACCESS_KEY)? else { return None };
        let Text::Plain(signature) = self.value(SIGNATURE)? else { return None };
        let known = self.signers.numbers.get(*name).copied();
        let mut mac = known.and_then(|number| self.signers.macs.get(number)).unwrap_or(&self.signers.unknown).clone();
        // Joined: to hash each value by itself costs a third more.
        let mut text = Vec::with_capacity(512);
        for (name, value) in &self.fields {
            if *name == SIGNATURE || (*name == UNIQUE_KEY_QUERY && envelope.version <= LAST_UNSIGNED_QUERY) {
                continue;
            }
            text.extend_from_slice(match value {
                Text::Plain(text) => text.as_bytes(),
                Text::Unescaped(place) => arena.get(place.clone())?,
            });
        }
        let (begin, rest) = self.signers.mark.split_at(self.signers.mark.len().min(text.len()));
        let is_marked = text.starts_with(begin) && body.starts_with(rest); // a mark may go on in the body
        let stamp = match is_marked && !self.signers.mark.is_empty() {
            true => Some(Stamp::read(&text, body, self.signers.mark.len())?),
            false => None,
        };
        mac.update(&text);
        mac.update(body);
        let right = base64(&mac.finalize().into_bytes().into());
        let is_same: bool = right[..].ct_eq(signature.as_bytes()).into();
        let user = known.filter(|_| is_same)?;
        (stamp.is_some() || !self.signers.need_stamps[user]).then_some((user, stamp))
    }

    fn value(&self, name: &str) -> Option<&Text<'a>> {
        let at = self.fields.binary_search_by_key(&name, |(known, _)| known).ok()?;
        self.fields.get(at).map(|(_, text)| text)
    }
}

fn mac_of(secret: &[u8]) -> Hmac<Sha1> {
    Hmac::new_from_slice(secret).expect("a secret of an HMAC may have any length")
}

/// A digest as it is sent.
fn base64(digest: &[u8; 20]) -> [u8; 28] {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = [b'='; 28];
    for (three, four) in digest.chunks(3).zip(text.chunks_mut(4)) {
        let mut bits = [0; 4];
        bits[1..=three.len()].copy_from_slice(three);
        let bits = u32::from_be_bytes(bits);
        for (place, letter) in four.iter_mut().take(three.len() + 1).enumerate() {
            *letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_as_text() {
        assert_eq!(&base64(&[0; 20]), b"AAAAAAAAAAAAAAAAAAAAAAAAAAA=");
        assert_eq!(&base64(&[255; 20]), b"//////////////////////////8=");
        let counted: Vec<u8> = (0..20).map(|byte| byte * 13).collect();
        assert_eq!(&base64(&counted.try_into().unwrap()), b"AA0aJzRBTltodYKPnKm2w9Dd6vc=");
    }
}
