//! Sends as clients write them: both forms, in JSON with all kinds of escapes and in RocketMQ's binary form.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use trimq_native_core::round::{Served, Span};
use trimq_native_core::rules::{Names, ReplyTexts, Rules};

/// A send of one message.
#[derive(Clone, Debug)]
pub struct Send {
    pub opaque: i32,
    pub topic: String,
    pub queue_id: i32,
    pub sys_flag: i32,
    pub born_timestamp: i64,
    pub flag: i32,
    pub reconsume_times: Option<i32>,
    pub properties: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub form: Form,
}

/// How it is written.
#[derive(Clone, Debug)]
pub struct Form {
    pub binary: bool,
    /// Numbers and truth values without quotation marks.
    pub bare: bool,
    /// Put between the parts of JSON.
    pub space: &'static str,
    /// How each letter of the properties is escaped, in turns.
    pub escapes: Vec<Escape>,
    /// Where the fields begin: they may come in any order.
    pub rotated: usize,
    /// Fields that nothing is made of.
    pub others: Vec<(&'static str, &'static str)>,
    /// Whether a header in JSON starts with its code, as clients write it: others are read by themselves only.
    pub code_first: bool,
}

/// A field of a header: its name, its value, and whether that is a text in JSON too.
pub type Field = (&'static str, String, bool);

impl Form {
    /// As most clients write it.
    pub fn plain(binary: bool) -> Form {
        Form {
            binary,
            bare: false,
            space: "",
            escapes: vec![Escape::Raw],
            rotated: 0,
            others: vec![],
            code_first: true,
        }
    }

    /// The whole frame of a request with these fields.
    pub fn frame(&self, code: u16, opaque: i32, flag: i32, mut fields: Vec<Field>, body: &[u8]) -> Vec<u8> {
        let count = fields.len();
        fields.rotate_left(self.rotated % count);
        fields.extend(self.others.iter().map(|(name, value)| (*name, (*value).to_owned(), true)));
        let of_both = if self.binary { in_binary } else { in_json };
        framed(&of_both(self, code, opaque, flag, &fields), self.binary.into(), body)
    }
}

/// A way to write a letter in JSON. Where a letter has not got it, it is one of the others.
#[derive(Clone, Copy, Debug)]
pub enum Escape {
    Raw,
    Short,
    Lower,
    Upper,
}

impl Send {
    /// The text of the properties.
    pub fn text(&self) -> String {
        text_of(&self.properties)
    }

    /// The last property of this name.
    pub fn property(&self, name: &str) -> Option<&str> {
        property(&self.properties, name)
    }

    /// The whole frame.
    pub fn frame(&self, code: u16) -> Vec<u8> {
        self.form.frame(code, self.opaque, 0, self.fields(code), &self.body)
    }

    fn fields(&self, code: u16) -> Vec<Field> {
        let text = |value: &str| (value.to_owned(), true);
        let number = |value: i64| (value.to_string(), false);
        let mut fields = vec![
            ("producerGroup", "a", text("group")),
            ("topic", "b", text(&self.topic)),
            ("defaultTopic", "c", text("TBW102")),
            ("defaultTopicQueueNums", "d", number(4)),
            ("queueId", "e", number(self.queue_id.into())),
            ("sysFlag", "f", number(self.sys_flag.into())),
            ("bornTimestamp", "g", number(self.born_timestamp)),
            ("flag", "h", number(self.flag.into())),
            ("properties", "i", text(&self.text())),
        ];
        if let Some(times) = self.reconsume_times {
            fields.push(("reconsumeTimes", "j", number(times.into())));
            fields.push(("unitMode", "k", ("false".to_owned(), false)));
            fields.push(("maxReconsumeTimes", "l", number(16)));
            fields.push(("batch", "m", ("false".to_owned(), false)));
        }
        let named = |(long, short, (value, is_text))| (if code == 10 { long } else { short }, value, is_text);
        fields.into_iter().map(named).collect()
    }
}

fn in_json(form: &Form, code: u16, opaque: i32, flag: i32, fields: &[Field]) -> Vec<u8> {
    let space = form.space;
    let mut ext = Vec::new();
    for (name, value, is_text) in fields {
        let value = match *name {
            "i" | "properties" => quoted(value, &form.escapes),
            _ if *is_text || !form.bare => quoted(value, &[Escape::Raw]),
            _ => value.clone(),
        };
        ext.push(format!("{space}\"{name}\"{space}:{space}{value}{space}"));
    }
    let mut parts = vec![
        format!("\"extFields\":{space}{{{}}}", ext.join(",")),
        format!("{space}\"flag\":{space}{flag}{space}"),
        "\"language\":\"JAVA\"".to_owned(),
        format!("\"opaque\":{opaque}"),
        "\"remark\":null".to_owned(),
        "\"serializeTypeCurrentRPC\":\"JSON\"".to_owned(),
        "\"version\":479".to_owned(),
    ];
    if !form.bare {
        parts.remove(4); // most clients leave it out
    }
    if form.code_first {
        let count = parts.len();
        parts.rotate_left(form.rotated % count);
        return format!("{{\"code\":{code},{}}}{space}", parts.join(",")).into_bytes();
    }
    parts.insert(0, format!("\"code\"{space}:{code}"));
    let count = parts.len();
    parts.rotate_left(form.rotated % count);
    format!("{space}{{{}}}{space}", parts.join(",")).into_bytes()
}

fn in_binary(_: &Form, code: u16, opaque: i32, flag: i32, fields: &[Field]) -> Vec<u8> {
    let mut ext = Vec::new();
    for (name, value, _) in fields {
        ext.extend((name.len() as u16).to_be_bytes());
        ext.extend(name.as_bytes());
        ext.extend((value.len() as u32).to_be_bytes());
        ext.extend(value.as_bytes());
    }
    let mut head = Vec::new();
    head.extend(code.to_be_bytes());
    head.extend([0, 1, 0xDF]); // language, version
    head.extend(opaque.to_be_bytes());
    head.extend(flag.to_be_bytes());
    head.extend([0; 4]); // no remark
    head.extend((ext.len() as u32).to_be_bytes());
    head.extend(ext);
    head
}

/// A frame of a header and a body.
pub fn framed(head: &[u8], encoding: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    frame.extend((4 + head.len() as u32 + body.len() as u32).to_be_bytes());
    frame.extend((u32::from(encoding) << 24 | head.len() as u32).to_be_bytes());
    frame.extend(head);
    frame.extend(body);
    frame
}

/// Names and values as they travel.
pub fn text_of(properties: &[(String, String)]) -> String {
    properties.iter().map(|(name, value)| format!("{name}\x01{value}\x02")).collect()
}

/// The last property of a name.
pub fn property<'a>(properties: &'a [(String, String)], name: &str) -> Option<&'a str> {
    properties.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
}

/// A text in JSON.
pub fn quoted(text: &str, escapes: &[Escape]) -> String {
    let mut out = String::from("\"");
    for (at, letter) in text.chars().enumerate() {
        let short = match letter {
            '"' | '\\' | '/' => Some(letter),
            '\x08' => Some('b'),
            '\x0c' => Some('f'),
            '\n' => Some('n'),
            '\r' => Some('r'),
            '\t' => Some('t'),
            _ => None,
        };
        let may_be_raw = letter >= ' ' && letter != '"' && letter != '\\';
        match (escapes[at % escapes.len()], short) {
            (Escape::Raw, _) if may_be_raw => out.push(letter),
            (Escape::Raw | Escape::Short, Some(short)) => out.extend(['\\', short]),
            (Escape::Short, None) if may_be_raw => out.push(letter),
            (escape, _) => {
                for unit in letter.encode_utf16(&mut [0; 2]) {
                    out += &match escape {
                        Escape::Upper => format!("\\u{unit:04X}"),
                        _ => format!("\\u{unit:04x}"),
                    };
                }
            }
        }
    }
    out + "\""
}

/// What the broker's configuration may be.
pub fn rules() -> impl Strategy<Value = Rules> {
    (any::<bool>(), select(vec![8, 20]), select(vec!["", "MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02"]))
        .prop_map(|(tags, host, added)| usual_rules(tags, host, added))
}

/// Rules with names as TriMQ has them: some of each kind.
pub fn usual_rules(tags: bool, host: u8, added: &str) -> Rules {
    let raw = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect::<Vec<_>>();
    Rules {
        names: Names {
            slow: raw(&SLOW).into_iter().collect(),
            fast: raw(&FAST).into_iter().collect(),
            slow_prefixes: raw(&PREFIXES),
            not_in_a_batch: raw(&NOT_IN_A_BATCH).into_iter().collect(),
        },
        added: added.into(),
        tags,
        store_host: (1..=host).collect(),
        reply: ReplyTexts {
            region: "DefaultRegion".into(),
            trace: "true".into(),
            language: ("PYTHON".into(), 9),
            version: 479,
        },
        half_topic: HALF_TOPIC.into(),
        halves: true,
    }
}

pub const HALF_TOPIC: &str = "RMQ_SYS_TRANS_HALF_TOPIC";
pub const SLOW: [&str; 7] = ["DELAY", "TRAN_MSG", "__CRC32#", "MSG_REGION", "REAL_TOPIC", "REAL_QID", "TRANS_OFFSET"];
pub const FAST: [&str; 3] = ["__SHARDINGKEY", "__BORNHOST", "__transactionId__"];
pub const PREFIXES: [&str; 3] = ["__", "INNER_", "POP_"];
pub const NOT_IN_A_BATCH: [&str; 3] = ["DELAY", "TRAN_MSG", "INNER_NUM"];

/// Letters of all lengths, without the separators.
pub fn letter() -> impl Strategy<Value = char> {
    prop_oneof![
        6 => proptest::char::range('!', '~'),
        2 => proptest::char::any().prop_filter("a separator", |letter| !"\x01\x02".contains(*letter)),
        1 => select(vec!['"', '\\', '/', '\n', '\t', '\r', '\x08', '\x0c', ' ', '\x00', '\x7f', 'ä', '\u{ffff}', '😀']),
    ]
}

pub fn letters(size: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    vec(letter(), size).prop_map(|letters| letters.into_iter().collect())
}

fn is_ordinary(name: &str) -> bool {
    let known = ["UNIQ_KEY", "KEYS", "TAGS", "WAIT"].contains(&name) || SLOW.contains(&name);
    !known && !PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Properties of an ordinary message, in any order; what is there twice included.
pub fn properties() -> impl Strategy<Value = Vec<(String, String)>> {
    let words = vec(letters(0..5), 1..4).prop_map(|words| words.join(" ")); // no value is empty
    let words = words.prop_map(|words| if words.is_empty() { " ".to_owned() } else { words });
    let other = letters(1..8).prop_filter("not an ordinary name", |name| is_ordinary(name));
    let pair = |name: &'static str, value: BoxedStrategy<String>| value.prop_map(move |value| (name.to_owned(), value));
    let any_one = prop_oneof![
        2 => pair("UNIQ_KEY", "[0-9A-Za-z]{1,32}".boxed()),
        2 => pair("KEYS", words.boxed()),
        2 => pair("TAGS", letters(1..6).boxed()),
        1 => pair("WAIT", Just("true".to_owned()).boxed()),
        1 => pair("__SHARDINGKEY", letters(1..6).boxed()),
        3 => (other, value()),
    ];
    (vec(any_one, 0..6), "[0-9A-F]{1,32}", any::<prop::sample::Index>()).prop_map(|(mut found, unique, at)| {
        found.insert(at.index(found.len() + 1), ("UNIQ_KEY".to_owned(), unique));
        found
    })
}

/// A value: an 0x01 may be in it.
pub fn value() -> impl Strategy<Value = String> {
    prop_oneof![4 => letters(1..12), 1 => (letters(0..4), letters(0..4)).prop_map(|(one, two)| one + "\x01" + &two)]
}

/// Topics as they stand in a header without an escape.
pub fn topic() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => select(vec!["Orders".to_owned(), "Payments".to_owned(), "T".to_owned()]),
        1 => "[%A-Za-z0-9_-]{1,127}",
        1 => "[ä-üA-Z]{1,60}",
    ]
}

pub fn form() -> impl Strategy<Value = Form> {
    let others = vec![("bname", "broker-a"), ("n", "broker-a"), ("zz", ""), ("brokerName", "x")];
    let escape = select(vec![Escape::Raw, Escape::Short, Escape::Lower, Escape::Upper]);
    (
        any::<bool>(),
        any::<bool>(),
        select(vec!["", "", " ", "\r\n\t "]),
        vec(escape, 1..5),
        0..16usize,
        subsequence(others, 0..=3),
    )
        .prop_map(|(binary, bare, space, escapes, rotated, others)| Form {
            binary,
            bare,
            space,
            escapes,
            rotated,
            others,
            code_first: true,
        })
}

/// Sends that are to be served.
pub fn send() -> impl Strategy<Value = Send> {
    let numbers = (any::<i32>(), 0..4i32, any::<i64>(), any::<i32>(), any::<Option<i32>>());
    let sys_flag = select(vec![0, 0, 1, 2, 3, 0x100, 0x703]);
    let queue_id = prop_oneof![8 => Just(None), 1 => (0..=i32::MAX).prop_map(Some)];
    let body = prop_oneof![6 => vec(any::<u8>(), 1..40), 1 => vec(any::<u8>(), 1..if cfg!(miri) { 80 } else { 3000 })];
    (numbers, queue_id, topic(), sys_flag, properties(), body, form()).prop_map(
        |(numbers, queue_id, topic, sys_flag, properties, body, form)| Send {
            opaque: numbers.0,
            topic,
            queue_id: queue_id.unwrap_or(numbers.1),
            sys_flag,
            born_timestamp: numbers.2,
            flag: numbers.3,
            reconsume_times: numbers.4,
            properties,
            body,
            form,
        },
    )
}

/// Frames of some connections in one buffer, with other bytes in between.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub bytes: Vec<u8>,
    pub spans: Vec<Span>,
    /// Where each frame of each span ends.
    pub stops: Vec<Vec<usize>>,
}

/// Lay the sends of each connection side by side, `gap` bytes in front of them.
pub fn laid_out(of_each: &[Vec<Send>], code: u16, gap: usize) -> Buffer {
    let frames: Vec<Vec<_>> = of_each.iter().map(|sends| sends.iter().map(|send| send.frame(code)).collect()).collect();
    side_by_side(&frames, gap)
}

/// The same for frames.
pub fn side_by_side(of_each: &[Vec<Vec<u8>>], gap: usize) -> Buffer {
    let mut found = Buffer { bytes: Vec::new(), spans: Vec::new(), stops: Vec::new() };
    for frames in of_each {
        found.bytes.resize(found.bytes.len() + gap, 0xA5);
        let begin = found.bytes.len();
        let mut stops = Vec::new();
        for frame in frames {
            found.bytes.extend(frame);
            stops.push(found.bytes.len());
        }
        found.spans.push(Span { place: begin..found.bytes.len(), most: usize::MAX });
        found.stops.push(stops);
    }
    found
}

/// What is served: sends of a code, as many as there are.
pub fn sends_of(codes: &[u16]) -> Served<'_> {
    Served { codes, most: usize::MAX, halves: usize::MAX, ..Served::default() }
}

/// Hosts of connections: 8 or 20 bytes each.
pub fn hosts(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(|at| vec![0x40 + at as u8; if at % 3 == 1 { 20 } else { 8 }]).collect()
}

/// The same as slices.
pub fn as_slices(hosts: &[Vec<u8>]) -> Vec<&[u8]> {
    hosts.iter().map(Vec::as_slice).collect()
}

/// A form of a send.
pub fn code() -> impl Strategy<Value = u16> {
    select(vec![10, 310])
}
