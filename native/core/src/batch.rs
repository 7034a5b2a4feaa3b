//! The body of a batch: messages of one topic and queue in, records out.
//!
//! Each is total size 4, magic 4, CRC 4, flag 4, body length 4, body, properties length 2, properties.

use std::ops::Range;

use crate::rows::{Context, Draft, Limits, Rows, Stamp};
use crate::rules::Rules;

const BODY_AT: usize = 20;
/// Bytes of a message in addition to its body and its properties.
const AROUND: usize = 22;

/// Read a batch to one queue. None if a message is not ordinary, or lengths are inconsistent.
///
/// `stamp` is that of all messages, except for the flag. Bodies and properties are not copied: they stay in `body`.
pub fn read(
    body: &[u8],
    topic: &str,
    queue_id: i32,
    stamp: Stamp,
    rules: &Rules,
    hosts: &[&[u8]],
    limits: Limits,
) -> Option<Rows> {
    let context = Context { rules, added: 0, hosts, limits };
    let mut rows = Rows::of_source();
    let queue = rows.add_queue(topic, queue_id)?;
    let mut at = 0;
    while at < body.len() {
        let message = split(body, at)?;
        let text = std::str::from_utf8(body.get(message.text.clone())?).ok()?;
        let found = rules.names.ordinary_in_batch(text)?;
        at = message.text.end;
        let stamp = Stamp { flag: message.flag, ..stamp };
        let draft = Draft { body: message.body, text: message.text, stamp, ..Draft::default() };
        if !rows.add(queue, draft, &found, &context) {
            return None;
        }
    }
    (!rows.is_empty()).then_some(rows)
}

struct Message {
    flag: i32,
    body: Range<usize>,
    text: Range<usize>,
}

fn split(batch: &[u8], at: usize) -> Option<Message> {
    let int = |begin: usize| Some(i32::from_be_bytes(batch.get(begin..begin.checked_add(4)?)?.try_into().ok()?));
    let size = usize::try_from(int(at)?).ok()?;
    let flag = int(at + 12)?;
    let body_length = usize::try_from(int(at + 16)?).ok()?;
    let body = at + BODY_AT..at.checked_add(BODY_AT)?.checked_add(body_length)?;
    let raw = batch.get(body.end..body.end.checked_add(2)?)?;
    let text_length = usize::try_from(i16::from_be_bytes(raw.try_into().ok()?)).ok()?;
    let text = body.end + 2..body.end + 2 + text_length;
    (size == AROUND + body_length + text_length && text.end <= batch.len()).then_some(Message { flag, body, text })
}
