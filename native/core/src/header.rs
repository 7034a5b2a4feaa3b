//! The headers of a send, in both of its forms, and of the end of a transaction, in both encodings, as far as they are
//! written as clients write them.
//!
//! A header in another form is not invalid: these functions return None for it, and the Python code, which supports all
//! forms, decodes it.

use std::ops::Range;

use memchr::memchr;

/// A send's envelope and header.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SendHeader<'a> {
    /// The number of the request.
    pub opaque: i32,
    /// The topic.
    pub topic: &'a str,
    /// The queue.
    pub queue_id: i32,
    /// Flags of the system.
    pub sys_flag: i32,
    /// When the producer created the message, in ms.
    pub born_timestamp: i64,
    /// Flags of the user.
    pub flag: i32,
    /// The position of the properties in the arena.
    pub properties: Range<usize>,
    /// How often it was consumed.
    pub reconsume_times: i32,
}

/// The end of a transaction's envelope and header.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EndHeader<'a> {
    /// The number of the request.
    pub opaque: i32,
    /// Whether the client expects no reply.
    pub oneway: bool,
    /// The producer group.
    pub group: &'a str,
    /// The offset of the half in its queue.
    pub offset: i64,
    /// The offset of the half in the log.
    pub physical: i64,
    /// Commit, rollback or unknown, as in sysFlag.
    pub state: i32,
}

/// The two codes of a send of one message.
const SEND_MESSAGE: u16 = 10;
const SEND_MESSAGE_V2: u16 = 310;
/// The code of the end of a transaction.
pub const END_TRANSACTION: u16 = 37;
/// The bit of the envelope's flag for requests without a reply.
const ONEWAY: i64 = 2;

/// The fields of a send, for both sets of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Topic,
    QueueId,
    SysFlag,
    BornTimestamp,
    Flag,
    Properties,
    ReconsumeTimes,
    Batch,
    /// A text that is not used.
    Text,
    /// A 32-bit number that is not used.
    Number,
    /// A boolean that is not used.
    Truth,
    /// Not a field of a send.
    Unknown,
}

use Field::{
    Batch, BornTimestamp, Flag, Number, Properties, QueueId, ReconsumeTimes, SysFlag, Text, Topic, Truth, Unknown,
};

/// Long names by field number. The numbers are bits in `Ext::seen`, which detects repeated fields.
const LONG: [(&str, Field); 13] = [
    ("producerGroup", Text),
    ("topic", Topic),
    ("defaultTopic", Text),
    ("defaultTopicQueueNums", Number),
    ("queueId", QueueId),
    ("sysFlag", SysFlag),
    ("bornTimestamp", BornTimestamp),
    ("flag", Flag),
    ("properties", Properties),
    ("reconsumeTimes", ReconsumeTimes),
    ("unitMode", Truth),
    ("maxReconsumeTimes", Number),
    ("batch", Batch),
];
const SHORT: [Field; 14] = [
    Text,
    Topic,
    Text,
    Number,
    QueueId,
    SysFlag,
    BornTimestamp,
    Flag,
    Properties,
    ReconsumeTimes,
    Truth,
    Number,
    Batch,
    Text,
];
/// The mandatory fields: the first eight, and the properties, without which there is no unique key.
const NEEDED: u32 = 0x1FF;

/// The number of a field, and its kind.
fn field_of(name: &str, long: bool) -> (Option<usize>, Field) {
    if long {
        let found = LONG.iter().position(|(known, _)| *known == name);
        return (found, found.map_or(Unknown, |at| LONG[at].1));
    }
    match *name.as_bytes() {
        [letter @ b'a'..=b'n'] => (Some(usize::from(letter - b'a')), SHORT[usize::from(letter - b'a')]),
        _ => (None, Unknown),
    }
}

/// The ext fields of a code.
pub(crate) trait Fields<'a> {
    /// Take a field. None if its value is not in the usual form.
    fn take(&mut self, name: &'a str, value: Value<'a>, arena: &mut Vec<u8>) -> Option<()>;
}

/// The ext fields of a send read so far.
#[derive(Default)]
struct Ext<'a> {
    header: SendHeader<'a>,
    seen: u32,
    batch: bool,
    long: bool,
}

impl<'a> Fields<'a> for Ext<'a> {
    fn take(&mut self, name: &'a str, value: Value<'a>, arena: &mut Vec<u8>) -> Option<()> {
        let (number, field) = field_of(name, self.long);
        if let Some(number) = number {
            if self.seen & (1 << number) != 0 {
                return None;
            }
            self.seen |= 1 << number;
        }
        match field {
            Topic => self.header.topic = value.text()?,
            QueueId => self.header.queue_id = value.number()?,
            SysFlag => self.header.sys_flag = value.number()?,
            BornTimestamp => self.header.born_timestamp = value.long()?,
            Flag => self.header.flag = value.number()?,
            ReconsumeTimes => self.header.reconsume_times = value.number()?,
            Batch => self.batch = value.truth()?,
            Truth => {
                value.truth()?;
            }
            Number => {
                value.number()?;
            }
            Text => {
                value.text()?;
            }
            Properties => {
                let begin = arena.len();
                match value {
                    Value::Text(text) => arena.extend_from_slice(text.as_bytes()),
                    Value::Escaped(raw) => unescape(raw, arena)?,
                    Value::Bare(_) => return None,
                }
                self.header.properties = begin..arena.len();
            }
            Unknown => {
                value.plain()?; // escapes in it would not be validated
            }
        }
        Some(())
    }
}

impl<'a> Ext<'a> {
    fn of(code: u16) -> Option<Ext<'a>> {
        let long = match code {
            SEND_MESSAGE => true,
            SEND_MESSAGE_V2 => false,
            _ => return None,
        };
        Some(Ext { long, ..Ext::default() })
    }

    fn done(self, envelope: &Envelope) -> Option<SendHeader<'a>> {
        let is_whole = self.seen & NEEDED == NEEDED && !self.batch && !envelope.oneway;
        is_whole.then_some(SendHeader { opaque: envelope.opaque, ..self.header })
    }
}

/// The ext fields of an end read so far.
#[derive(Default)]
struct EndExt<'a> {
    header: EndHeader<'a>,
    seen: u32,
}

/// The fields of an end; the first five are mandatory.
const END_FIELDS: [&str; 8] = [
    "producerGroup",
    "tranStateTableOffset",
    "commitLogOffset",
    "commitOrRollback",
    "msgId",
    "topic",
    "fromTransactionCheck",
    "transactionId",
];
const END_NEEDED: u32 = 0x1F;

impl<'a> Fields<'a> for EndExt<'a> {
    fn take(&mut self, name: &'a str, value: Value<'a>, _arena: &mut Vec<u8>) -> Option<()> {
        let Some(number) = END_FIELDS.iter().position(|known| *known == name) else {
            return value.plain().map(|_| ()); // escapes in it would not be validated
        };
        if self.seen & (1 << number) != 0 {
            return None;
        }
        self.seen |= 1 << number;
        match name {
            "producerGroup" => self.header.group = value.text()?,
            "tranStateTableOffset" => self.header.offset = value.long()?,
            "commitLogOffset" => self.header.physical = value.long()?,
            "commitOrRollback" => self.header.state = value.number()?,
            "fromTransactionCheck" => {
                value.truth()?;
            }
            _ => {
                value.text()?;
            }
        }
        Some(())
    }
}

impl<'a> EndExt<'a> {
    fn done(self, envelope: &Envelope) -> Option<EndHeader<'a>> {
        let Envelope { opaque, oneway, .. } = *envelope;
        (self.seen & END_NEEDED == END_NEEDED).then_some(EndHeader { opaque, oneway, ..self.header })
    }
}

/// A JSON value: a text, a text with escapes (raw), or a number or boolean (raw).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Text(&'a str),
    Escaped(&'a str),
    Bare(&'a str),
}

impl<'a> Value<'a> {
    pub(crate) fn text(self) -> Option<&'a str> {
        match self {
            Value::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Texts of numbers count as numbers, as they do for Java's fastjson.
    fn plain(self) -> Option<&'a str> {
        match self {
            Value::Text(text) | Value::Bare(text) => Some(text),
            Value::Escaped(_) => None,
        }
    }

    fn long(self) -> Option<i64> {
        whole_number(self.plain()?)
    }

    fn number(self) -> Option<i32> {
        self.long()?.try_into().ok()
    }

    fn truth(self) -> Option<bool> {
        match self.plain()? {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        }
    }
}

/// A decimal number as all clients write it: no plus sign, no leading zeros.
fn whole_number(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    match *digits.as_bytes() {
        [b'0'] if digits.len() == text.len() => return Some(0),
        [] | [b'0', ..] => return None,
        _ => {}
    }
    // accumulated as a negative number, since i64 has one more of these
    let mut below: i64 = 0;
    for byte in digits.bytes() {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        below = below.checked_mul(10)?.checked_sub(i64::from(digit))?;
    }
    if digits.len() == text.len() {
        below.checked_neg()
    } else {
        Some(below)
    }
}

/// A JSON text that is being read.
struct Json<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Json<'a> {
    fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        loop {
            let byte = *bytes.get(self.at)?;
            if !matches!(byte, b' ' | b'\t' | b'\n' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    /// Whether the object has another member. `first`: no member has been read yet.
    fn another(&mut self, first: bool) -> Option<bool> {
        match self.peek()? {
            b'}' => {
                self.at += 1;
                Some(false)
            }
            b',' if !first => {
                self.at += 1;
                Some(true)
            }
            _ if first => Some(true),
            _ => None,
        }
    }

    fn key(&mut self) -> Option<&'a str> {
        let key = self.string()?.text()?;
        self.expect(b':')?;
        Some(key)
    }

    fn string(&mut self) -> Option<Value<'a>> {
        self.expect(b'"')?;
        let begin = self.at;
        let bytes = self.text.as_bytes();
        let mut escaped = false;
        loop {
            self.at += plain_prefix(bytes.get(self.at..)?);
            match *bytes.get(self.at)? {
                b'"' => break,
                b'\\' => {
                    escaped = true;
                    self.at += 2;
                }
                0..=0x1F => return None,
                _ => self.at += 1,
            }
        }
        let raw = self.text.get(begin..self.at)?;
        self.at += 1;
        Some(if escaped { Value::Escaped(raw) } else { Value::Text(raw) })
    }

    /// A text, a number or a boolean.
    fn value(&mut self) -> Option<Value<'a>> {
        match self.peek()? {
            b'"' => self.string(),
            b'-' | b'0'..=b'9' | b't' | b'f' => {
                let begin = self.at;
                let bytes = self.text.as_bytes();
                while matches!(bytes.get(self.at), Some(b'-' | b'0'..=b'9' | b'a'..=b'z')) {
                    self.at += 1;
                }
                let bare = self.text.get(begin..self.at)?;
                (matches!(bare, "true" | "false") || whole_number(bare).is_some()).then_some(Value::Bare(bare))
            }
            _ => None,
        }
    }

    /// The same for a field of the envelope that may be null.
    fn value_or_null(&mut self) -> Option<Option<Value<'a>>> {
        if self.peek()? == b'n' {
            let end = self.at + 4;
            let is_null = self.text.get(self.at..end)? == "null";
            self.at = end;
            return is_null.then_some(None);
        }
        self.value().map(Some)
    }

    /// Skip a field of the envelope that is not used. None also if it has escapes, which would have to be validated.
    fn skip_value(&mut self) -> Option<()> {
        if let Some(value) = self.value_or_null()? {
            value.plain()?;
        }
        Some(())
    }
}

/// The number of bytes before the first quotation mark, backslash or control character, checked eight at a time.
///
/// It may be too small, by less than eight, never too large.
fn plain_prefix(bytes: &[u8]) -> usize {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TOPS: u64 = 0x8080_8080_8080_8080;
    let mut count = 0;
    for eight in bytes.chunks_exact(8) {
        let mut word = [0; 8];
        word.copy_from_slice(eight);
        let word = u64::from_le_bytes(word);
        // the lowest byte with its top bit set is the first match; above it, a borrow may have set other top bits
        let below = |word: u64, limit: u8| word.wrapping_sub(ONES * u64::from(limit)) & !word & TOPS;
        let found =
            below(word, 0x20) | below(word ^ (ONES * u64::from(b'"')), 1) | below(word ^ (ONES * u64::from(b'\\')), 1);
        if found != 0 {
            return count + found.trailing_zeros() as usize / 8;
        }
        count += 8;
    }
    count
}

/// Append the unescaped text of a JSON string to `out`. None for a lone surrogate and for an invalid escape.
pub(crate) fn unescape(raw: &str, out: &mut Vec<u8>) -> Option<()> {
    let mut rest = raw;
    while let Some(at) = memchr(b'\\', rest.as_bytes()) {
        out.extend_from_slice(&rest.as_bytes()[..at]);
        let kind = *rest.as_bytes().get(at + 1)?;
        rest = rest.get(at + 2..)?;
        let plain = match kind {
            b'u' => {
                let unit = four_digits(rest)?;
                rest = &rest[4..];
                let letter = if (0xD800..0xDC00).contains(&unit) {
                    let low = four_digits(rest.strip_prefix("\\u")?)?;
                    rest = &rest[6..];
                    if !(0xDC00..0xE000).contains(&low) {
                        return None;
                    }
                    char::from_u32(0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00))?
                } else {
                    char::from_u32(unit)?
                };
                out.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes());
                continue;
            }
            b'"' | b'\\' | b'/' => kind,
            b'b' => 8,
            b'f' => 12,
            b'n' => b'\n',
            b'r' => b'\r',
            b't' => b'\t',
            _ => return None,
        };
        out.push(plain);
    }
    out.extend_from_slice(rest.as_bytes());
    Some(())
}

fn four_digits(text: &str) -> Option<u32> {
    let digits = text.as_bytes().get(..4)?;
    digits.iter().try_fold(0, |value, digit| Some(value << 4 | char::from(*digit).to_digit(16)?))
}

/// The code of a request by the start of its header: `{"code":37,` as clients write it, or the binary form. None if it
/// is not written like that.
pub fn code_of(head: &[u8], encoding: u32) -> Option<u16> {
    match encoding {
        0 => {}
        1 => return Some(u16::from_be_bytes(head.get(..2)?.try_into().ok()?)),
        _ => return None,
    }
    let digits = head.strip_prefix(b"{\"code\":")?;
    let end = digits.iter().take(6).position(|byte| *byte == b',')?;
    let code = whole_number(std::str::from_utf8(&digits[..end]).ok()?)?;
    code.try_into().ok()
}

/// Read a send of `code` from a JSON header, and append its properties to `arena`.
///
/// If this returns None, `arena` may have been extended; the caller truncates it.
pub fn send_in_json<'a>(head: &'a [u8], code: u16, arena: &mut Vec<u8>) -> Option<SendHeader<'a>> {
    let mut ext = Ext::of(code)?;
    let envelope = in_json(head, code, &mut ext, arena)?;
    ext.done(&envelope)
}

/// Read the end of a transaction from a header in JSON (encoding 0) or in RocketMQ's binary form (1).
pub fn end_in(head: &[u8], encoding: u32) -> Option<EndHeader<'_>> {
    let mut ext = EndExt::default();
    let envelope = match encoding {
        0 => in_json(head, END_TRANSACTION, &mut ext, &mut Vec::new())?,
        1 => in_binary(head, END_TRANSACTION, &mut ext, &mut Vec::new())?,
        _ => return None,
    };
    ext.done(&envelope)
}

/// The fields of an envelope that are used.
pub(crate) struct Envelope {
    opaque: i32,
    oneway: bool,
    /// The version of the client.
    pub(crate) version: i32,
}

/// Read a request of `code` from a JSON header.
pub(crate) fn in_json<'a, F: Fields<'a>>(
    head: &'a [u8],
    code: u16,
    ext: &mut F,
    arena: &mut Vec<u8>,
) -> Option<Envelope> {
    let mut json = Json { text: std::str::from_utf8(head).ok()?, at: 0 };
    let mut has_code = false;
    let mut envelope = Envelope { opaque: 0, oneway: false, version: 0 };
    let mut seen = 0;
    let mut once = |number: u32| (seen & 1 << number == 0).then(|| seen |= 1 << number);
    json.expect(b'{')?;
    let mut first = true;
    while json.another(first)? {
        first = false;
        match json.key()? {
            "code" => {
                once(0)?;
                has_code = bare(json.value()?)? == i64::from(code);
            }
            "opaque" => {
                once(1)?;
                envelope.opaque = i32::try_from(bare(json.value()?)?).ok()?;
            }
            "flag" => {
                once(2)?;
                envelope.oneway = is_oneway(bare(json.value()?)?)?;
            }
            "version" => {
                once(3)?;
                envelope.version = i32::try_from(bare(json.value()?)?).ok()?;
            }
            "language" => {
                once(4)?;
                json.skip_value()?;
            }
            "remark" => {
                once(5)?;
                if let Some(value) = json.value_or_null()? {
                    value.text()?;
                }
            }
            "serializeTypeCurrentRPC" => {
                once(6)?;
                json.skip_value()?;
            }
            "extFields" => {
                once(7)?;
                ext_in_json(&mut json, ext, arena)?;
            }
            _ => return None,
        }
    }
    (json.peek().is_none() && has_code).then_some(envelope)
}

/// Whether a request with this flag is one-way. None for a reply, and for a flag with further bits.
fn is_oneway(flag: i64) -> Option<bool> {
    match flag {
        0 => Some(false),
        ONEWAY => Some(true),
        _ => None,
    }
}

fn bare(value: Value<'_>) -> Option<i64> {
    match value {
        Value::Bare(text) => whole_number(text),
        _ => None,
    }
}

fn ext_in_json<'a, F: Fields<'a>>(json: &mut Json<'a>, ext: &mut F, arena: &mut Vec<u8>) -> Option<()> {
    json.expect(b'{')?;
    let mut first = true;
    while json.another(first)? {
        first = false;
        let name = json.key()?;
        let value = json.value()?;
        ext.take(name, value, arena)?;
    }
    Some(())
}

/// A header in RocketMQ's binary form that is being read.
struct Binary<'a>(&'a [u8]);

impl<'a> Binary<'a> {
    fn take(&mut self, size: usize) -> Option<&'a [u8]> {
        if size > self.0.len() {
            return None;
        }
        let (taken, rest) = self.0.split_at(size);
        self.0 = rest;
        Some(taken)
    }

    fn short(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(self.take(2)?.try_into().ok()?))
    }

    fn int(&mut self) -> Option<i32> {
        Some(i32::from_be_bytes(self.take(4)?.try_into().ok()?))
    }

    fn sized(&mut self, size: impl TryInto<usize>) -> Option<&'a str> {
        std::str::from_utf8(self.take(size.try_into().ok()?)?).ok()
    }
}

/// The same for a header in RocketMQ's binary form.
pub fn send_in_binary<'a>(head: &'a [u8], code: u16, arena: &mut Vec<u8>) -> Option<SendHeader<'a>> {
    let mut ext = Ext::of(code)?;
    let envelope = in_binary(head, code, &mut ext, arena)?;
    ext.done(&envelope)
}

/// Read a request of `code` from a header in RocketMQ's binary form.
pub(crate) fn in_binary<'a, F: Fields<'a>>(
    head: &'a [u8],
    code: u16,
    ext: &mut F,
    arena: &mut Vec<u8>,
) -> Option<Envelope> {
    let mut binary = Binary(head);
    if binary.short()? != code {
        return None;
    }
    binary.take(1)?; // language
    let version = i32::from(binary.short()? as i16);
    let opaque = binary.int()?;
    let oneway = is_oneway(i64::from(binary.int()?))?;
    if binary.int()? != 0 {
        return None; // a request with a remark
    }
    if usize::try_from(binary.int()?).ok()? != binary.0.len() {
        return None;
    }
    while !binary.0.is_empty() {
        let size = binary.short()?;
        let name = binary.sized(size)?;
        let size = binary.int()?;
        let value = binary.sized(size)?;
        ext.take(name, Value::Text(value), arena)?;
    }
    Some(Envelope { opaque, oneway, version })
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: &str = concat!(
        r#"{"code":310,"extFields":{"a":"g","b":"T","c":"TBW102","d":"4","e":"1","f":"0","g":"17","h":"2","#,
        r#""i":"KEYS\u0001k\u0002","j":"3","k":"false","l":"0","m":"false","n":"broker-a"},"flag":0,"#,
        r#""language":"JAVA","opaque":77,"serializeTypeCurrentRPC":"JSON","version":479}"#
    );

    fn json(text: &str) -> Option<(SendHeader<'_>, Vec<u8>)> {
        let mut arena = vec![9];
        let header = send_in_json(text.as_bytes(), 310, &mut arena)?;
        Some((header, arena))
    }

    #[test]
    fn a_code_by_the_start_of_its_header() {
        assert_eq!(
            [0, 1, 2, 255].map(|encoding| code_of(FRAME.as_bytes(), encoding)),
            [Some(310), Some(31522), None, None]
        );
        for (text, code) in
            [(r#"{"code":37,"#, Some(37)), (r#"{"code":37}"#, None), (r#"{ "code":37,"#, None), ("{", None)]
        {
            assert_eq!(code_of(text.as_bytes(), 0), code, "{text}");
        }
    }

    #[test]
    fn a_send() {
        let (header, arena) = json(FRAME).unwrap();
        assert_eq!(arena, b"\x09KEYS\x01k\x02");
        let expected = SendHeader {
            opaque: 77,
            topic: "T",
            queue_id: 1,
            sys_flag: 0,
            born_timestamp: 17,
            flag: 2,
            properties: 1..8,
            reconsume_times: 3,
        };
        assert_eq!(header, expected);
    }

    #[test]
    fn numbers_may_stand_without_quotation_marks() {
        let text = FRAME.replace(r#""e":"1""#, r#""e":1"#).replace(r#""m":"false""#, r#""m":false"#);
        assert!(json(&text).is_some());
    }

    #[test]
    fn numbers_at_the_edges() {
        for number in ["0", "-1", "9223372036854775807", "-9223372036854775808", "1000000000000000000"] {
            assert_eq!(whole_number(number), number.parse().ok(), "{number}");
        }
        for text in ["", "-", "-0", "00", "9223372036854775808", "-9223372036854775809", "99999999999999999999", "1a"] {
            assert_eq!(whole_number(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_not_in_the_usual_form_is_left() {
        for (old, new) in [
            (r#""e":"1""#, r#""e":"+1""#),
            (r#""e":"1""#, r#""e":"01""#),
            (r#""e":"1""#, r#""e":"1.0""#),
            (r#""e":"1""#, r#""e":"2147483648""#),
            (r#""e":"1""#, r#""e":"1","e":"2""#),
            (r#""e":"1","#, ""),
            (r#""m":"false""#, r#""m":"true""#),
            (r#""m":"false""#, r#""m":"FALSE""#),
            (r#""j":"3""#, r#""j":null"#),
            (r#""b":"T""#, r#""b":"\u0054""#),
            (r#""flag":0"#, r#""flag":2"#),
            (r#""opaque":77"#, r#""opaque":7777777777"#),
            (r#""opaque":77"#, r#""opaque":"77""#),
            (r#""opaque":77"#, r#""opaque":77,"opaque":78"#),
            (r#""version":479"#, r#""version":479,"new":1"#),
            (r#"\u0002"#, r#"\u00"#),
            (r#"\u0002"#, r#"\ud800"#),
            (r#"\u0002"#, r#"\ud800\ud800"#),
            (r#"\u0002"#, r#"\x"#),
            (r#""n":"broker-a""#, r#""z":"\x""#),
            (r#""language":"JAVA""#, r#""language":"\ud800""#),
            (r#""serializeTypeCurrentRPC":"JSON""#, r#""serializeTypeCurrentRPC":"\u00""#),
            (r#""code":310"#, r#""code":311"#),
            (r#""code":310,"#, ""),
            ("479}", "479}}"),
            ("479}", "479"),
        ] {
            let text = FRAME.replace(old, new);
            assert_ne!(text, FRAME);
            assert_eq!(json(&text), None, "{new}");
        }
    }

    #[test]
    fn what_stands_before_the_first_special_byte() {
        for special in ["\"", "\\", "\x1f", "\x00", "\n"] {
            for plain in 0..40 {
                for behind in [0, 1, 30] {
                    let text =
                        format!("{}{special}{}", "ä ~\x7f".repeat(9)[..plain / 5 * 5].to_owned(), "\"b".repeat(behind));
                    let first = text.bytes().position(|byte| byte < 0x20 || byte == b'"' || byte == b'\\').unwrap();
                    let found = plain_prefix(text.as_bytes());
                    assert!(found <= first && first - found < 8, "{text:?}: {found}");
                }
            }
        }
        assert_eq!(plain_prefix(&[b'a'; 17]), 16);
    }

    #[test]
    fn escapes_of_all_kinds() {
        let (_, arena) = json(&FRAME.replace("KEYS", r#"\"\\\/\b\f\n\r\t\u00e4\ud83d\ude00ö"#)).unwrap();
        assert_eq!(&arena[1..], "\"\\/\x08\x0c\n\r\tä😀ö\x01k\x02".as_bytes());
    }

    #[test]
    fn a_send_in_binary() {
        let mut head = Vec::from([1, 54, 0, 1, 223, 0, 0, 0, 77, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut ext = Vec::new();
        for (name, value) in [
            ("a", "g"),
            ("b", "T"),
            ("c", "T"),
            ("d", "4"),
            ("e", "1"),
            ("f", "0"),
            ("g", "17"),
            ("h", "0"),
            ("i", "x"),
        ] {
            ext.extend([0, 1, name.as_bytes()[0], 0, 0, 0, value.len() as u8]);
            ext.extend(value.as_bytes());
        }
        head.extend((ext.len() as u32).to_be_bytes());
        head.extend(&ext);
        let mut arena = Vec::new();
        let header = send_in_binary(&head, 310, &mut arena).unwrap();
        assert_eq!((header.opaque, header.topic, header.queue_id), (77, "T", 1));
        assert_eq!(arena, b"x");
        for cut in 0..head.len() {
            assert_eq!(send_in_binary(&head[..cut], 310, &mut arena), None);
        }
    }
}
