//! Replies to sends that were stored, and to ends of transactions.

use std::fmt::Write;

use crate::rows::Place;
use crate::rules::Rules;

/// The content of a reply.
#[derive(Debug)]
pub struct Stored<'a> {
    /// The number of the request.
    pub opaque: i32,
    /// The queue.
    pub queue_id: i32,
    /// Where the message is stored.
    pub place: Place,
    /// Its unique key: letters and digits.
    pub unique: &'a str,
}

/// Append the reply to a send to `out`, in the encoding of its request.
pub fn send(out: &mut Vec<u8>, rules: &Rules, stored: &Stored<'_>, binary: bool) {
    let mut text = String::with_capacity(320);
    let begin = out.len();
    out.extend_from_slice(&[0; 8]);
    if binary {
        in_binary(out, rules, stored, &mut text);
    } else {
        in_json(rules, stored, &mut text);
        out.extend_from_slice(text.as_bytes());
    }
    put_words(out, begin, binary);
}

/// Append the reply SUCCESS without fields to `out`, in the encoding of its request.
pub fn plain(out: &mut Vec<u8>, rules: &Rules, opaque: i32, binary: bool) {
    let begin = out.len();
    out.extend_from_slice(&[0; 8]);
    if binary {
        envelope_in_binary(out, rules, opaque);
        out.extend_from_slice(&[0; 4]);
    } else {
        let mut text = String::with_capacity(128);
        text.push_str(r#"{"code":0"#);
        envelope_in_json(&mut text, rules, opaque);
        out.extend_from_slice(text.as_bytes());
    }
    put_words(out, begin, binary);
}

/// Set the two words of the frame that starts at `begin`.
fn put_words(out: &mut [u8], begin: usize, binary: bool) {
    let size = (out.len() - begin - 8) as u32;
    out[begin..begin + 4].copy_from_slice(&(size + 4).to_be_bytes());
    out[begin + 4..begin + 8].copy_from_slice(&(u32::from(binary) << 24 | size).to_be_bytes());
}

/// The offset id: the host and the log offset in hexadecimal digits.
fn offset_id(text: &mut String, rules: &Rules, physical: i64) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    for byte in rules.store_host.iter().chain(&physical.to_be_bytes()) {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

/// Append the decimal digits of a number; writing into a String cannot fail.
fn number(text: &mut String, value: i64) {
    let _ = write!(text, "{value}");
}

fn in_json(rules: &Rules, stored: &Stored<'_>, text: &mut String) {
    let reply = &rules.reply;
    text.push_str(r#"{"code":0,"extFields":{"MSG_REGION":""#);
    text.push_str(&reply.region);
    text.push_str(r#"","TRACE_ON":""#);
    text.push_str(&reply.trace);
    text.push_str(r#"","msgId":""#);
    offset_id(text, rules, stored.place.physical);
    text.push_str(r#"","queueId":""#);
    number(text, i64::from(stored.queue_id));
    text.push_str(r#"","queueOffset":""#);
    number(text, stored.place.in_queue);
    text.push_str(r#"","transactionId":""#);
    text.push_str(stored.unique);
    text.push_str(r#""}"#);
    envelope_in_json(text, rules, stored.opaque);
}

fn envelope_in_json(text: &mut String, rules: &Rules, opaque: i32) {
    text.push_str(r#","flag":1,"language":""#);
    text.push_str(&rules.reply.language.0);
    text.push_str(r#"","opaque":"#);
    number(text, i64::from(opaque));
    text.push_str(r#","serializeTypeCurrentRPC":"JSON","version":"#);
    number(text, i64::from(rules.reply.version));
    text.push('}');
}

/// Everything before the length of the fields.
fn envelope_in_binary(out: &mut Vec<u8>, rules: &Rules, opaque: i32) {
    let reply = &rules.reply;
    out.extend_from_slice(&0i16.to_be_bytes());
    out.push(reply.language.1);
    out.extend_from_slice(&(reply.version as i16).to_be_bytes());
    out.extend_from_slice(&opaque.to_be_bytes());
    out.extend_from_slice(&1i32.to_be_bytes());
    out.extend_from_slice(&0i32.to_be_bytes());
}

fn in_binary(out: &mut Vec<u8>, rules: &Rules, stored: &Stored<'_>, text: &mut String) {
    let reply = &rules.reply;
    envelope_in_binary(out, rules, stored.opaque);
    let begin = out.len();
    out.extend_from_slice(&[0; 4]);
    field(out, "MSG_REGION", &reply.region);
    field(out, "TRACE_ON", &reply.trace);
    offset_id(text, rules, stored.place.physical);
    field(out, "msgId", text);
    text.clear();
    number(text, i64::from(stored.queue_id));
    field(out, "queueId", text);
    text.clear();
    number(text, stored.place.in_queue);
    field(out, "queueOffset", text);
    field(out, "transactionId", stored.unique);
    let size = (out.len() - begin - 4) as u32;
    out[begin..begin + 4].copy_from_slice(&size.to_be_bytes());
}

fn field(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(&(name.len() as u16).to_be_bytes());
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&(value.len() as u32).to_be_bytes());
    out.extend_from_slice(value.as_bytes());
}
