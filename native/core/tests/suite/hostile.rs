//! Any bytes: nothing panics, nothing counts twice, and nothing depends on bytes that are not the frames'.

use std::collections::HashSet;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, Index};
use trimq_native_core::batch;
use trimq_native_core::halves::Pending;
use trimq_native_core::header::{code_of, end_in, send_in_binary, send_in_json, EndHeader, SendHeader};
use trimq_native_core::round::{Alone, Part, Request, Round, Served, Single, Span};
use trimq_native_core::rows::{Context, Limits, Stamp};
use trimq_native_core::rules::Rules;

use crate::batches::{body_of, is_ordinary, message};
use crate::config;
use crate::frames::{as_slices, code, framed, hosts, laid_out, rules, send, sends_of, usual_rules, Send, HALF_TOPIC};
use crate::names::any_text;
use crate::round_trip::{queues, AT, WIDE};
use crate::transactions::{kinds_and_halves, of_log, place, Log};

type Read = for<'a> fn(&'a [u8], u16, &mut Vec<u8>) -> Option<SendHeader<'a>>;

/// Something that goes wrong on the way.
#[derive(Clone, Debug)]
enum Harm {
    Flip(Index, u8),
    Cut(Index),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    /// A number of four bytes.
    Number(Index, u32),
    Repeat(Index, Index),
    /// Another field at the begin of an object: the first or the second one.
    Field(usize, &'static str),
}

/// A field at the begin of an object in JSON: the first or the second one.
fn field() -> impl Strategy<Value = Harm> {
    let field = select(vec![
        "\"e\":\"3\",",
        "\"zz\":\"\\x\",",
        "\"m\":true,",
        "\"batch\":\"true\",",
        "\"flag\":2,",
        "\"flag\":\"2\",",
        "\"code\":7,",
    ]);
    (0..2usize, field).prop_map(|(at, field)| Harm::Field(at, field))
}

fn harm() -> impl Strategy<Value = Harm> {
    let number = prop_oneof![Just(0), Just(u32::MAX), Just(i32::MAX as u32), 0..300u32, any::<u32>()];
    let text = select(vec!["\"", "\\", "{", "}", ",", ":", "\\u", "\\ud800", "null", "\u{1}", "\u{2}", "-", "0"]);
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, mask)| Harm::Flip(at, mask)),
        1 => any::<Index>().prop_map(Harm::Cut),
        3 => (any::<Index>(), text).prop_map(|(at, text)| Harm::Insert(at, text.as_bytes().to_vec())),
        2 => field(),
        1 => (any::<Index>(), vec(any::<u8>(), 1..6)).prop_map(|(at, bytes)| Harm::Insert(at, bytes)),
        2 => (any::<Index>(), 1..9usize).prop_map(|(at, count)| Harm::Remove(at, count)),
        3 => (any::<Index>(), number).prop_map(|(at, number)| Harm::Number(at, number)),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(from, to)| Harm::Repeat(from, to)),
    ]
}

fn harmed(mut bytes: Vec<u8>, harms: &[Harm]) -> Vec<u8> {
    for harm in harms {
        if bytes.is_empty() {
            break;
        }
        let count = bytes.len();
        match harm {
            Harm::Flip(at, mask) => bytes[at.index(count)] ^= mask,
            Harm::Cut(at) => bytes.truncate(at.index(count)),
            Harm::Insert(at, more) => {
                let at = at.index(count);
                bytes.splice(at..at, more.iter().copied());
            }
            Harm::Remove(at, most) => {
                let at = at.index(count);
                bytes.drain(at..count.min(at + most));
            }
            Harm::Number(at, number) => {
                let at = at.index(count);
                let end = count.min(at + 4);
                bytes[at..end].copy_from_slice(&number.to_be_bytes()[..end - at]);
            }
            Harm::Field(number, field) => {
                let mut begins = bytes.iter().enumerate().filter(|(_, byte)| **byte == b'{').map(|(at, _)| at + 1);
                if let Some(at) = begins.nth(*number) {
                    bytes.splice(at..at, field.bytes());
                }
            }
            Harm::Repeat(from, to) => {
                let (one, other) = (from.index(count), to.index(count));
                let part = bytes[one.min(other)..one.max(other)].to_vec();
                bytes.splice(one..one, part);
            }
        }
    }
    bytes
}

/// Sizes at the edges of what a size can be.
fn edge() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), 0..200usize, Just(usize::MAX), any::<usize>()]
}

fn limits() -> impl Strategy<Value = Limits> {
    prop_oneof![
        3 => Just(WIDE),
        2 => (edge(), edge()).prop_map(|(body, record)| Limits { body, record }),
    ]
}

/// Spans of a buffer: also such as do not lie in it, or end before they begin.
fn spans() -> impl Strategy<Value = Vec<Span>> {
    vec((edge(), edge(), edge()).prop_map(|(begin, end, most)| Span { place: begin..end, most }), 0..4)
}

/// Everything that is done with a round, in its order; what is known of it holds at each step.
fn all_of_it(
    frames: &[u8],
    spans: &[Span],
    served: &Served<'_>,
    rules: &Rules,
    limits: Limits,
    (good, real): (&[bool], &[bool]),
) {
    let hosts = hosts(spans.len());
    let hosts = as_slices(&hosts);
    let mut round = Round::read(frames, spans, served, rules, &hosts, limits);
    assert!(round.requests.len() <= served.most);
    assert!(halves_of(&round) <= served.halves);
    assert_consistent(&round, frames, spans);
    assert_ends(&round, &served.pending);
    assert_no_texts_left(&round, frames, spans, served, rules, limits);
    spans.iter().for_each(|span| alone(frames.get(span.place.clone()).unwrap_or(&[]), served, rules));
    let before: usize = round.requests.len();
    let reals = round.real_places().count();
    round.leave_out(spans, &vec![true; queues(&round).len()], &vec![true; reals]);
    assert_eq!((round.requests.len(), round.real_places().count()), (before, reals), "all are good");
    round.leave_out(spans, good, real);
    assert_consistent(&round, frames, spans);
    assert_ends(&round, &served.pending);
    let starts = vec![1 << 40; round.rows.queues().len()];
    let mut out = vec![0; round.rows.total()];
    let done = round.write(frames, &mut out, &AT, &starts, rules, &hosts);
    assert_eq!(done.is_ok(), !round.rows.is_empty(), "{done:?}");
    let replies = round.replies(rules);
    assert_eq!(replies.len(), spans.len());
    assert_eq!((round.rows.queue_of(usize::MAX), round.rows.size_of(usize::MAX)), (None, 0));
    // other frames than those that were read, none at all, or a wrong number of queues: said, not done
    let few = round.write(&[], &mut out, &AT, &starts, rules, &hosts);
    let of_frames = round.requests.iter().any(|request| request.end.is_none());
    assert!(few.is_err() == (of_frames || round.rows.is_empty()), "commit records are made of texts alone");
    assert!(round.write(frames, &mut out, &AT, &[], rules, &hosts).is_err());
}

/// The number of halves in a round.
fn halves_of(round: &Round) -> usize {
    let rows = &round.rows;
    let is_half = |queue: usize| rows.text(&rows.queues()[queue].topic) == HALF_TOPIC;
    (0..rows.len()).filter(|row| rows.queue_of(*row).is_some_and(is_half)).count()
}

/// Only pending halves are ended, each once.
fn assert_ends(round: &Round, pending: &Pending<'_>) {
    let mut ended = HashSet::new();
    for end in round.requests.iter().filter_map(|request| request.end) {
        let state = usize::try_from(end.offset - pending.first).expect("a state of the window");
        assert_eq!(pending.states.get(state), Some(&0));
        assert!(ended.insert(end.offset), "one half is ended twice");
    }
}

/// Frames that were handed back left nothing: the texts are those of a round of the served frames alone.
fn assert_no_texts_left(
    round: &Round,
    frames: &[u8],
    spans: &[Span],
    served: &Served<'_>,
    rules: &Rules,
    limits: Limits,
) {
    let exact = |(part, span): (&Part, &Span)| Span { place: span.place.start..part.stop, most: span.most };
    let only: Vec<Span> = round.parts.iter().zip(spans).map(exact).collect();
    let hosts = hosts(spans.len());
    let again = Round::read(frames, &only, served, rules, &as_slices(&hosts), limits);
    assert_eq!(format!("{round:?}"), format!("{again:?}"));
}

/// Bytes that are read by themselves are what they are in a round, where they are one frame in JSON.
fn alone(bytes: &[u8], served: &Served<'_>, rules: &Rules) {
    let mut arena = Vec::new();
    let single = Single::read(bytes, served.codes, &mut arena);
    let hosts = hosts(1);
    let span = Span { place: 0..bytes.len(), most: 1 };
    let whole = Served { most: 1, halves: 1, ..*served };
    let round = Round::read(bytes, &[span], &whole, rules, &as_slices(&hosts), WIDE);
    let of_transaction = |request: &Request| request.end.is_some() || halves_of(&round) == 1;
    let request = round.requests.first();
    if let Some(request) = request {
        let is_one = !request.binary && round.parts[0].stop == bytes.len();
        assert_eq!(single.is_some(), is_one);
        assert_eq!(single == Some(Alone::OfTransaction), is_one && of_transaction(request));
    }
    let Some(Alone::Send(single)) = single else { return };
    let text = String::from_utf8(arena.clone()).unwrap_or_default();
    let found = Single::found(&text, rules);
    let Some(request) = request else {
        if found.is_some() {
            // what only the log's measures or the topics' table rule out
            let header = single.header;
            let properties = header.properties.len() + rules.added.len();
            let is_topic = !header.topic.is_empty() && header.topic.len() <= 127 && header.topic != HALF_TOPIC;
            assert!(!is_topic || header.queue_id < 0 || properties > 32_767);
        }
        return;
    };
    let (unique, _) = found.unwrap();
    let rows = &round.rows;
    let queue = &rows.queues()[0];
    assert_eq!((single.header.topic, single.header.queue_id), (rows.text(&queue.topic), queue.id));
    assert_eq!((single.header.opaque, unique), (request.opaque, rows.text(&request.unique)));
    let around = 75 + 8 + rules.store_host.len() + single.header.topic.len() + rules.added.len();
    assert_eq!(rows.size_of(0), around + single.header.properties.len() + bytes.len() - single.body_at);
}

fn assert_consistent(round: &Round, frames: &[u8], spans: &[Span]) {
    let rows = &round.rows;
    assert_eq!(round.parts.len(), spans.len());
    let with_message = round.requests.iter().filter_map(|request| request.row);
    assert_eq!(with_message.collect::<Vec<_>>(), (0..rows.len()).collect::<Vec<_>>());
    for request in &round.requests {
        assert_eq!(request.row.is_none(), request.end.is_some_and(|end| !end.commit), "a rollback has no message");
    }
    let rollbacks = round.requests.iter().filter(|request| request.row.is_none()).count();
    assert!(round.real_places().count() <= halves_of(round) + rollbacks);
    assert!(round.real_places().all(|(_, queue_id)| queue_id >= 0));
    let mut totals = (0, 0);
    for (number, queue) in rows.queues().iter().enumerate() {
        let own = || (0..rows.len()).filter(|message| rows.queue_of(*message) == Some(number));
        assert_eq!(queue.count, own().count());
        assert!(queue.count > 0, "a queue that nothing goes to");
        assert_eq!(queue.size, own().map(|message| rows.size_of(message)).sum::<usize>());
        assert!(!rows.text(&queue.topic).is_empty());
        totals = (totals.0 + queue.count, totals.1 + queue.size);
    }
    assert_eq!(totals, (rows.len(), rows.total()));
    assert_eq!(rows.keys().sum::<usize>(), rows.hashes().len());
    assert!(rows.hashes().iter().all(|hash| *hash >= 0));
    for (number, (part, span)) in round.parts.iter().zip(spans).enumerate() {
        assert!(part.count <= span.most);
        assert_eq!(part.count, round.requests.iter().filter(|request| request.span == number).count());
        assert_eq!(part.stop, ends_of(frames, span, part.count), "where the next one begins");
    }
}

/// Where so many frames of a span end, by their length words.
fn ends_of(frames: &[u8], span: &Span, count: usize) -> usize {
    (0..count).fold(span.place.start, |at, _| {
        let total = u32::from_be_bytes(frames[at..at + 4].try_into().unwrap());
        let end = at + 4 + total as usize;
        assert!(end <= span.place.end);
        end
    })
}

fn same_header(one: Option<SendHeader<'_>>, other: Option<SendHeader<'_>>) {
    assert_eq!(one.is_some(), other.is_some());
    if let (Some(one), Some(other)) = (one, other) {
        assert_eq!(one.topic, other.topic);
        assert_eq!(one.properties.len(), other.properties.len());
    }
}

/// What is taken of a header in JSON is what a parser of all of JSON finds in it.
fn assert_is_json(head: &[u8], code: u16, header: &SendHeader<'_>, properties: &[u8]) {
    let found: serde_json::Value = serde_json::from_slice(head).expect("JSON");
    let ext = &found["extFields"];
    let name = |long: &'static str, short: &'static str| if code == 10 { long } else { short };
    let number = |value: &serde_json::Value| match value {
        serde_json::Value::Null => Some(0),
        serde_json::Value::String(text) => text.parse().ok(),
        value => value.as_i64(),
    };
    assert_eq!((number(&found["code"]), number(&found["flag"])), (Some(code.into()), Some(0)));
    assert_eq!(number(&found["opaque"]), Some(header.opaque.into()));
    assert_eq!(ext[name("topic", "b")].as_str(), Some(header.topic));
    assert_eq!(number(&ext[name("queueId", "e")]), Some(header.queue_id.into()));
    assert_eq!(number(&ext[name("sysFlag", "f")]), Some(header.sys_flag.into()));
    assert_eq!(number(&ext[name("bornTimestamp", "g")]), Some(header.born_timestamp));
    assert_eq!(number(&ext[name("flag", "h")]), Some(header.flag.into()));
    assert_eq!(ext[name("properties", "i")].as_str().map(str::as_bytes), Some(properties));
    assert_eq!(number(&ext[name("reconsumeTimes", "j")]), Some(header.reconsume_times.into()));
    let batch = &ext[name("batch", "m")];
    assert!(batch.is_null() || *batch == false || *batch == "false");
}

/// Look at a header in all ways: what is already in the arena stays, and what is put there is a text.
fn any_header(head: &[u8], code: u16) {
    for (is_json, read) in [(true, send_in_json as Read), (false, send_in_binary as Read)] {
        let mut arena = b"kept".to_vec();
        let found = read(head, code, &mut arena);
        assert_eq!(&arena[..4], b"kept");
        if let Some(header) = &found {
            assert_eq!(header.properties, 4..arena.len());
            assert!(std::str::from_utf8(&arena[4..]).is_ok());
            if is_json {
                assert_is_json(head, code, header, &arena[4..]);
            }
        }
        same_header(found, read(head, code, &mut Vec::new()));
    }
    for encoding in 0..4 {
        let found = end_in(head, encoding);
        if let (0, Some(header)) = (encoding, &found) {
            assert_is_json_end(head, header);
        }
        assert!(found.is_none() || encoding < 2);
        let code = code_of(head, encoding);
        assert!(code.is_none() || encoding < 2);
        if let (Some(code), true) = (code, encoding != 1) {
            assert!(head.starts_with(format!("{{\"code\":{code},").as_bytes()));
        }
    }
}

/// The same for the end of a transaction.
fn assert_is_json_end(head: &[u8], header: &EndHeader<'_>) {
    let found: serde_json::Value = serde_json::from_slice(head).expect("JSON");
    let ext = &found["extFields"];
    let number = |value: &serde_json::Value| match value {
        serde_json::Value::String(text) => text.parse().ok(),
        value => value.as_i64(),
    };
    assert_eq!(number(&found["code"]), Some(37));
    assert_eq!(number(&found["flag"]).unwrap_or(0), if header.oneway { 2 } else { 0 });
    assert_eq!(number(&found["opaque"]).unwrap_or(0), i64::from(header.opaque));
    assert_eq!(ext["producerGroup"].as_str(), Some(header.group));
    assert_eq!(number(&ext["tranStateTableOffset"]), Some(header.offset));
    assert_eq!(number(&ext["commitLogOffset"]), Some(header.physical));
    assert_eq!(number(&ext["commitOrRollback"]), Some(header.state.into()));
    assert!(ext["msgId"].is_string());
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_bytes_as_frames(
        bytes in vec(any::<u8>(), 0..300), code in prop_oneof![code(), any::<u16>()], spans in spans(), most in edge(),
        halves in edge(), limits in limits(), good in vec(any::<bool>(), 0..4),
    ) {
        let codes = [code, 37];
        let served = Served { most, halves, ..sends_of(&codes) };
        all_of_it(&bytes, &spans, &served, &usual_rules(true, 8, ""), limits, (&good, &good));
    }

    /// Frames around any bytes, so that those are read as a header.
    #[test]
    fn any_bytes_as_headers(head in vec(any::<u8>(), 0..200), encoding in 0..3u8, code in code()) {
        any_header(&head, code);
        let frame = framed(&head, encoding, b"body");
        let spans = [Span { place: 0..frame.len(), most: 9 }];
        let codes = [code, 37];
        let served = Served { most: 9, ..sends_of(&codes) };
        all_of_it(&frame, &spans, &served, &usual_rules(true, 8, ""), WIDE, (&[true], &[]));
    }

    /// Texts of which some are JSON.
    #[test]
    fn any_text_as_a_header(
        text in r#"[ \t]?\{("(code|extFields|flag|opaque|a|b|i|remark|é)"[:,]?(310|-?[0-9]{1,20}|true|null|\{|\}|"(\\?[a-z"/\\]){0,4}"),?){0,6}\}?"#,
        code in code(),
    ) {
        any_header(text.as_bytes(), code);
    }

    #[test]
    fn harmed_headers(send in send(), harms in vec(harm(), 1..4), code in code(), code_first in any::<bool>()) {
        let mut send = Send { body: vec![], ..send };
        send.form.code_first = code_first;
        let frame = send.frame(code);
        any_header(&harmed(frame[8..].to_vec(), &harms), code);
    }

    /// A field that is there twice, or means something, or is escaped in a wrong way.
    #[test]
    fn headers_with_another_field(send in send(), field in field(), code in code()) {
        let mut send = Send { body: vec![], ..send };
        send.form.binary = false;
        any_header(&harmed(send.frame(code)[8..].to_vec(), &[field]), code);
    }

    #[test]
    fn harmed_frames(
        of_each in vec(vec(send(), 0..4), 1..4), code in code(), rules in rules(), harms in vec(harm(), 0..5),
        limits in limits(), most in prop_oneof![2 => Just(usize::MAX), 1 => edge()], good in vec(any::<bool>(), 0..6),
        moved in (any::<bool>(), edge()),
    ) {
        let mut buffer = laid_out(&of_each, code, 1);
        buffer.bytes = harmed(buffer.bytes, &harms);
        if moved.0 {
            buffer.spans[0].place.end = moved.1;
        }
        let codes = [code];
        let served = Served { most, ..sends_of(&codes) };
        all_of_it(&buffer.bytes, &buffer.spans, &served, &rules, limits, (&good, &[]));
    }

    /// Headers that are harmed in frames whose lengths are right again.
    #[test]
    fn frames_with_harmed_headers(
        sends in vec((send(), vec(harm(), 0..2)), 1..5), code in code(), good in vec(any::<bool>(), 0..6),
    ) {
        let mut bytes = Vec::new();
        for (send, harms) in &sends {
            let frame = Send { body: vec![], ..send.clone() }.frame(code);
            bytes.extend(framed(&harmed(frame[8..].to_vec(), harms), frame[4], &send.body));
        }
        let spans = [Span { place: 0..bytes.len(), most: usize::MAX }];
        all_of_it(&bytes, &spans, &sends_of(&[code]), &usual_rules(true, 8, "x\x01y\x02"), WIDE, (&good, &[]));
    }

    /// Sends, halves and ends that are harmed, and a log and states that are.
    #[test]
    fn harmed_transactions(
        (of_each, halves) in kinds_and_halves(), code in code(), rules in rules(), place in place(),
        harms in (vec(harm(), 0..3), vec(harm(), 0..3), vec(harm(), 0..2)), limits in limits(), most in edge(),
        all in any::<bool>(), good in vec(any::<bool>(), 0..6), real in vec(any::<bool>(), 0..4),
        moved in prop_oneof![3 => Just((0, 0)), 1 => any::<(i64, i64)>(), 1 => (-3..3i64, -3..3i64)],
    ) {
        let mut log = Log::of(&halves, &rules, place);
        let of_each = of_log(of_each, &log);
        let mut buffer = crate::transactions::laid_out(&of_each, code, 1);
        buffer.bytes = harmed(buffer.bytes, &harms.0);
        log.bytes = harmed(log.bytes, &harms.1);
        log.states = harmed(log.states, &harms.2);
        log.start = log.start.wrapping_add(moved.0);
        log.first = log.first.wrapping_add(moved.1);
        let codes = [code, 37];
        let served = if all { log.served(&codes) } else { Served { halves: most, ..log.served(&codes) } };
        all_of_it(&buffer.bytes, &buffer.spans, &served, &rules, limits, (&good, &real));
    }

    /// Headers of them that are harmed in frames whose lengths are right again, a connection for each.
    #[test]
    fn harmed_headers_of_transactions(
        (of_each, halves) in kinds_and_halves(), harms in vec(vec(harm(), 0..2), 1..9), code in code(),
        good in vec(any::<bool>(), 0..6), real in vec(any::<bool>(), 0..4),
    ) {
        let rules = usual_rules(true, 8, "x\x01y\x02");
        let log = Log::of(&halves, &rules, (0, 0, 1));
        let (mut bytes, mut spans) = (Vec::new(), Vec::new());
        for (sent, harms) in of_log(of_each, &log).iter().flatten().zip(harms.iter().cycle()) {
            let frame = sent.frame(code);
            let size = u32::from_be_bytes([0, frame[5], frame[6], frame[7]]) as usize;
            let head = harmed(frame[8..8 + size].to_vec(), harms);
            any_header(&head, code);
            let begin = bytes.len();
            bytes.extend(framed(&head, frame[4], &frame[8 + size..]));
            spans.push(Span { place: begin..bytes.len(), most: usize::MAX });
        }
        all_of_it(&bytes, &spans, &log.served(&[code, 37]), &rules, WIDE, (&good, &real));
    }

    /// A record of any bytes behind the fields that are looked at first.
    #[test]
    fn any_bytes_as_halves(
        bytes in vec(any::<u8>(), 0..200), size in edge(), sys_flag in any::<u32>(), state in select(vec![8, 12]),
    ) {
        let mut log = Log::of(&[], &usual_rules(true, 8, ""), (0, 0, 0));
        let mut record = [&(size as u32).to_be_bytes()[..], &0xDAA3_20A7_u32.to_be_bytes(), &[0; 28]].concat();
        record.extend((sys_flag & !0xC).to_be_bytes());
        record.extend(&bytes);
        let count = record.len() as u32;
        if size > 200 {
            record[..4].copy_from_slice(&count.to_be_bytes());
        }
        log.bytes = record;
        log.states = vec![0];
        let frame = crate::transactions::an_end(state).frame();
        let spans = [Span { place: 0..frame.len(), most: 1 }];
        all_of_it(&frame, &spans, &log.served(&[37]), &usual_rules(true, 8, ""), WIDE, (&[true], &[]));
    }

    /// What lies around a span, and behind its end, is not looked at.
    #[test]
    fn only_the_spans_bytes_count(
        of_each in vec(vec(send(), 0..3), 1..3), code in code(), gap in 1..40usize, cut in any::<Index>(), other in any::<u8>(),
    ) {
        let rules = usual_rules(true, 8, "");
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let mut buffer = laid_out(&of_each, code, gap);
        let last = buffer.spans.len() - 1;
        let place = buffer.spans[last].place.clone();
        buffer.spans[last].place.end = place.start + cut.index(place.len() + 1); // its last frame is cut off
        let mut bytes = buffer.bytes.clone();
        for (at, byte) in bytes.iter_mut().enumerate() {
            if !buffer.spans.iter().any(|span| span.place.contains(&at)) {
                *byte = other;
            }
        }
        let one = Round::read(&buffer.bytes, &buffer.spans, &sends_of(&[code]), &rules, &hosts, WIDE);
        let two = Round::read(&bytes, &buffer.spans, &sends_of(&[code]), &rules, &hosts, WIDE);
        prop_assert_eq!(format!("{one:?}"), format!("{two:?}"));
        let whole = buffer.stops[last].iter().filter(|stop| **stop <= buffer.spans[last].place.end).count();
        prop_assert_eq!(one.parts[last].count, whole);
    }

    #[test]
    fn any_bytes_as_batches(
        bytes in vec(any::<u8>(), 0..200), messages in vec(message(), 0..4), harms in vec(harm(), 0..4), limits in limits(),
        topic in "\\PC{0,9}", queue_id in any::<i32>(),
    ) {
        let rules = usual_rules(true, 20, "x\x01y\x02");
        for body in [bytes, harmed(body_of(&messages), &harms)] {
            let host: &[&[u8]] = &[&[1; 8]];
            let found = batch::read(&body, &topic, queue_id, Stamp::default(), &rules, host, limits);
            let served = is_ordinary(&body, limits.body) && queue_id >= 0 && !topic.is_empty();
            if limits.record == usize::MAX {
                prop_assert_eq!(found.is_some(), served);
            }
            let Some(mut rows) = found else { continue };
            prop_assert!(served);
            let context = Context { rules: &rules, added: 0, hosts: host, limits };
            let mut out = vec![0; rows.total()];
            prop_assert!(rows.write(&body[..1], &mut out, &AT, &[0], &context).is_err());
            prop_assert!(rows.write(&body, &mut out, &AT, &[0], &context).is_ok());
            prop_assert_eq!(rows.units().len(), 20 * rows.len());
        }
    }

    #[test]
    fn any_text_as_properties(text in prop_oneof![any_text(), any::<String>(), "[\\x01\\x02a]{0,20}"]) {
        let names = usual_rules(true, 8, "").names;
        for found in [names.ordinary(&text), names.ordinary_in_batch(&text)].into_iter().flatten() {
            for value in [found.unique, found.keys, found.tag].into_iter().flatten() {
                prop_assert!(!value.is_empty() && text.contains(value));
            }
        }
    }
}
