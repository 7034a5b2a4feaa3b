//! Halves that are sent and halves in the log that are ended, among other sends.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, Index};
use trimq_native_core::halves::Pending;
use trimq_native_core::reply;
use trimq_native_core::round::{Alone, Round, Served, Single, Span};
use trimq_native_core::rows::{Limits, Mismatch};
use trimq_native_core::rules::Rules;

use crate::config;
use crate::frames::{
    as_slices, code, form, framed, hosts, property, rules, send, side_by_side, text_of, topic, usual_rules, Buffer,
    Form, Send, HALF_TOPIC,
};
use crate::model::{crc, Record};
use crate::round_trip::{
    added, assert_is, expected_of, queues, replies, start_of, step, written, Message, Step, AT, WIDE,
};

const END: u16 = 37;
const GROUP: &str = "PG";

// -- what is sent

/// An END_TRANSACTION.
#[derive(Clone, Debug)]
pub struct End {
    pub opaque: i32,
    pub group: String,
    pub offset: i64,
    pub physical: i64,
    pub state: i32,
    pub oneway: bool,
    pub form: Form,
}

impl End {
    pub fn frame(&self) -> Vec<u8> {
        let text = |value: &str| value.to_owned();
        let fields = vec![
            ("producerGroup", self.group.clone(), true),
            ("tranStateTableOffset", self.offset.to_string(), false),
            ("commitLogOffset", self.physical.to_string(), false),
            ("commitOrRollback", self.state.to_string(), false),
            ("fromTransactionCheck", text("false"), false),
            ("msgId", text("0A000001"), true),
            ("transactionId", text("0A000001"), true),
        ];
        self.form.frame(END, self.opaque, if self.oneway { 2 } else { 0 }, fields, b"")
    }
}

/// A request of a connection.
#[derive(Clone, Debug)]
pub enum Sent {
    Send(Send),
    Half(Send),
    /// The end of the half of this number in the log.
    End(usize, End),
}

impl Sent {
    pub fn frame(&self, code: u16) -> Vec<u8> {
        match self {
            Sent::Send(send) | Sent::Half(send) => send.frame(code),
            Sent::End(_, end) => end.frame(),
        }
    }

    /// Where its message goes.
    fn queue(&self, log: &Log) -> Option<(String, i32)> {
        match self {
            Sent::Send(send) => Some((send.topic.clone(), send.queue_id)),
            Sent::Half(_) => Some((HALF_TOPIC.to_owned(), 0)),
            Sent::End(number, end) => (end.state == 8).then(|| log.halves[*number].place()),
        }
    }

    /// Where the message of a half is for, or would have been.
    fn real(&self, log: &Log) -> Option<(String, i32)> {
        match self {
            Sent::Half(send) => Some((send.topic.clone(), send.queue_id)),
            Sent::End(number, end) => (end.state == 12).then(|| log.halves[*number].place()),
            Sent::Send(_) => None,
        }
    }

    /// What becomes of it.
    fn step(&self, rules: &Rules, host: &[u8], log: &Log) -> Step {
        match self {
            Sent::Send(send) => step(send, rules, host),
            Sent::Half(send) => {
                let mut made = step(send, rules, host);
                let message = made.message.as_mut().expect("a message");
                message.sys_flag &= !4;
                message.queue_id = 0;
                message.topic = HALF_TOPIC.to_owned();
                let unique = send.property("UNIQ_KEY").expect("a unique key").to_owned();
                message.properties.extend([
                    ("__transactionId__".to_owned(), unique),
                    ("REAL_TOPIC".to_owned(), send.topic.clone()),
                    ("REAL_QID".to_owned(), send.queue_id.to_string()),
                ]);
                made
            }
            Sent::End(number, end) => Step {
                message: (end.state == 8).then(|| log.halves[*number].committed()),
                opaque: end.opaque,
                binary: end.form.binary,
                queue_id: None,
                oneway: end.oneway,
            },
        }
    }
}

// -- what is in the log

/// A half in the log.
#[derive(Clone, Debug)]
pub struct Half {
    pub properties: Vec<(String, String)>,
    pub record: Record,
}

impl Half {
    fn place(&self) -> (String, i32) {
        let value = |name| property(&self.properties, name);
        (
            value("REAL_TOPIC").expect("a topic").to_owned(),
            value("REAL_QID").expect("a queue").parse().expect("a number"),
        )
    }

    /// Its commit record.
    fn committed(&self) -> Message {
        let (topic, queue_id) = self.place();
        let record = &self.record;
        let own = self.properties.iter().filter(|(name, _)| name != "REAL_TOPIC" && name != "REAL_QID");
        Message {
            topic,
            queue_id,
            body: record.body.clone(),
            properties: own.cloned().collect(),
            flag: record.flag,
            sys_flag: (record.sys_flag & !0x30) | 8,
            born_timestamp: record.born_timestamp,
            born_host: record.born_host.clone(),
            reconsume_times: record.reconsume_times,
            half: record.physical_offset,
        }
    }

    /// Set its properties, and the sizes that follow from them.
    fn with(mut self, properties: Vec<(String, String)>) -> Half {
        self.record.properties = text_of(&properties).into_bytes();
        self.properties = properties;
        let record = &mut self.record;
        record.body_crc = crc(&record.body);
        let hosts = record.born_host.len() + record.store_host.len();
        record.size = 75 + hosts + record.body.len() + record.topic.len() + record.properties.len();
        self
    }
}

/// A part of the log with halves, other bytes in front of each, and their states.
#[derive(Clone, Debug)]
pub struct Log {
    pub bytes: Vec<u8>,
    pub start: i64,
    pub states: Vec<u8>,
    pub first: i64,
    pub halves: Vec<Half>,
}

impl Log {
    /// A log of these halves; the properties that the broker adds are put between the others.
    pub fn of(halves: &[Half], rules: &Rules, (start, first, gap): (i64, i64, usize)) -> Log {
        let mut log = Log { bytes: vec![], start, states: vec![0; halves.len()], first, halves: vec![] };
        for (number, half) in halves.iter().enumerate() {
            log.bytes.resize(log.bytes.len() + gap, 0xA5);
            let mut properties = half.properties.clone();
            let middle = properties.len() / 2;
            properties.splice(middle..middle, added(rules));
            let mut half = half.clone().with(properties);
            half.record.queue_offset = first + number as i64;
            half.record.physical_offset = start + log.bytes.len() as i64;
            log.bytes.extend(half.record.bytes());
            log.halves.push(half);
        }
        log
    }

    pub fn pending(&self) -> Pending<'_> {
        Pending { log: &self.bytes, start: self.start, states: &self.states, first: self.first }
    }

    pub fn served<'a>(&'a self, codes: &'a [u16]) -> Served<'a> {
        Served { codes, most: usize::MAX, halves: usize::MAX, pending: self.pending() }
    }

    /// An end of a half, in a form.
    fn end(&self, number: usize, state: i32, form: Form) -> End {
        let Record { queue_offset: offset, physical_offset: physical, .. } = self.halves[number].record;
        End { opaque: 7, group: GROUP.to_owned(), offset, physical, state, oneway: false, form }
    }
}

// -- examples

fn pair(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// Properties of an ordinary message of which no name is there twice, and those of a half, in any order.
fn half_properties(more: Vec<(String, String)>) -> impl Strategy<Value = Vec<(String, String)>> {
    send().prop_flat_map(move |send| {
        let mut found: Vec<(String, String)> = Vec::new();
        for one in
            send.properties.into_iter().chain([pair("TRAN_MSG", "true"), pair("PGROUP", GROUP)]).chain(more.clone())
        {
            if found.iter().all(|(name, _)| *name != one.0) {
                found.push(one);
            }
        }
        Just(found).prop_shuffle()
    })
}

/// Sends of halves that are to be served.
fn half() -> impl Strategy<Value = Send> {
    let sys_flag = select(vec![4, 5, 0x104, 0x707]);
    (send(), half_properties(vec![]), sys_flag, select(vec![None, Some(0)])).prop_map(
        |(send, properties, sys_flag, reconsume_times)| Send { sys_flag, properties, reconsume_times, ..send },
    )
}

/// Halves in the log.
pub fn stored() -> impl Strategy<Value = Half> {
    let queue_id = prop_oneof![4 => 0..4i32, 1 => 0..=i32::MAX];
    let properties = (topic(), queue_id).prop_flat_map(|(topic, queue_id)| {
        let queue_id = queue_id.to_string();
        half_properties(vec![pair("__transactionId__", "A1"), pair("REAL_TOPIC", &topic), pair("REAL_QID", &queue_id)])
    });
    let hosts = (vec(any::<u8>(), 20), any::<bool>(), any::<bool>());
    let numbers = (any::<i32>(), any::<i64>(), any::<i64>(), any::<i32>(), any::<i64>());
    (vec(any::<u8>(), 1..60), properties, hosts, numbers, select(vec![0, 1, 2, 0x703])).prop_map(
        |(body, properties, (host, born_v6, store_v6), numbers, sys_flag)| {
            let host_of = |v6: bool| host[..if v6 { 20 } else { 8 }].to_vec();
            let record = Record {
                size: 0,
                magic: 0xDAA3_20A7,
                body_crc: 0,
                queue_id: 0,
                flag: numbers.0,
                queue_offset: 0,
                physical_offset: 0,
                sys_flag: sys_flag | if born_v6 { 0x10 } else { 0 } | if store_v6 { 0x20 } else { 0 },
                born_timestamp: numbers.1,
                born_host: host_of(born_v6),
                store_timestamp: numbers.2,
                store_host: host_of(store_v6),
                reconsume_times: numbers.3,
                prepared_transaction_offset: numbers.4,
                body,
                topic: HALF_TOPIC.into(),
                properties: vec![],
            };
            Half { properties: vec![], record }.with(properties)
        },
    )
}

/// Where a log starts, and its states; and how many bytes lie between records.
pub fn place() -> impl Strategy<Value = (i64, i64, usize)> {
    let numbers = || prop_oneof![Just(0), 0..1i64 << 50];
    (numbers(), numbers(), 0..9usize)
}

/// A request, whose end has no half yet.
#[derive(Clone, Debug)]
pub enum Kind {
    Send(Send),
    Half(Send),
    End(bool, bool, i32, Form),
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        1 => send().prop_map(Kind::Send),
        1 => half().prop_map(Kind::Half),
        2 => (any::<bool>(), prop::bool::weighted(0.3), any::<i32>(), form())
            .prop_map(|(commit, oneway, opaque, form)| Kind::End(commit, oneway, opaque, form)),
    ]
}

/// Give each end a half of its own, from the last one on; ends for which there is none are left away.
pub fn of_log(of_each: Vec<Vec<Kind>>, log: &Log) -> Vec<Vec<Sent>> {
    let mut left: Vec<usize> = (0..log.halves.len()).collect();
    let mut sent = |kind| match kind {
        Kind::Send(send) => Some(Sent::Send(send)),
        Kind::Half(send) => Some(Sent::Half(send)),
        Kind::End(commit, oneway, opaque, form) => {
            let number = left.pop()?;
            let end = log.end(number, if commit { 8 } else { 12 }, form);
            Some(Sent::End(number, End { oneway, opaque, ..end }))
        }
    };
    of_each.into_iter().map(|kinds| kinds.into_iter().filter_map(&mut sent).collect()).collect()
}

/// Requests of connections, and halves for their ends.
pub fn kinds_and_halves() -> impl Strategy<Value = (Vec<Vec<Kind>>, Vec<Half>)> {
    (vec(vec(kind(), 0..6), 1..5), vec(stored(), 0..8))
}

pub fn laid_out(of_each: &[Vec<Sent>], code: u16, gap: usize) -> Buffer {
    let frames: Vec<Vec<_>> = of_each.iter().map(|sent| sent.iter().map(|one| one.frame(code)).collect()).collect();
    side_by_side(&frames, gap)
}

fn steps(of_each: &[Vec<Sent>], rules: &Rules, hosts: &[&[u8]], log: &Log) -> Vec<Vec<Step>> {
    let of_span = |(sent, host): (&Vec<Sent>, &&[u8])| sent.iter().map(|one| one.step(rules, host, log)).collect();
    of_each.iter().zip(hosts).map(of_span).collect()
}

/// Look whether a round is what was sent: its facts, and what is written.
fn assert_is_what_was_sent(
    round: &mut Round,
    of_each: &[Vec<Sent>],
    buffer: &Buffer,
    rules: &Rules,
    hosts: &[&[u8]],
    log: &Log,
) {
    for (number, sent) in of_each.iter().enumerate() {
        let stop =
            sent.len().checked_sub(1).map_or(buffer.spans[number].place.start, |last| buffer.stops[number][last]);
        assert_eq!((round.parts[number].count, round.parts[number].stop), (sent.len(), stop));
    }
    let all: Vec<&Sent> = of_each.iter().flatten().collect();
    let mut real: Vec<(String, i32)> = Vec::new();
    for place in all.iter().filter_map(|one| one.real(log)) {
        if !real.contains(&place) {
            real.push(place);
        }
    }
    let found: Vec<_> = round.real_places().map(|(topic, queue_id)| (topic.to_owned(), queue_id)).collect();
    assert_eq!(found, real);
    assert_eq!(round.requests.len(), all.len());
    let mut rows = 0;
    for (request, sent) in round.requests.iter().zip(&all) {
        let queue = sent.queue(log);
        assert_eq!(request.row, queue.as_ref().map(|_| rows));
        rows += usize::from(queue.is_some());
        let end = request.end.map(|end| (end.offset, end.commit, end.oneway));
        let named = round.rows.text(&request.unique);
        match sent {
            Sent::Send(send) | Sent::Half(send) => {
                assert_eq!((end, request.queue_id, request.opaque), (None, send.queue_id, send.opaque));
                assert_eq!(Some(named), send.property("UNIQ_KEY"));
            }
            Sent::End(_, own) => {
                assert_eq!(end, Some((own.offset, own.state == 8, own.oneway)));
                assert_eq!((request.opaque, request.binary, named), (own.opaque, own.form.binary, ""));
                assert_eq!(request.queue_id, queue.map_or(0, |(_, queue_id)| queue_id));
            }
        }
    }
    assert_eq!(round.rows.len(), rows);
    let expected = expected_of(&steps(of_each, rules, hosts, log), rules);
    if rows == 0 {
        assert_eq!(round.write(&buffer.bytes, &mut [], &AT, &[], rules, hosts), Err(Mismatch("queues or bytes")));
        assert_eq!((round.rows.total(), round.rows.queues().len(), round.rows.hashes().len()), (0, 0, 0));
        let found: Vec<_> = round.replies(rules).iter().map(|bytes| replies(bytes)).collect();
        assert_eq!(found, expected.replies);
        return;
    }
    let starts: Vec<i64> = queues(round).iter().map(start_of).collect();
    let bytes = written(round, buffer, rules, hosts, &starts).unwrap();
    assert_is(round, &bytes, rules, &expected);
    let mut places = expected.records.iter().map(|record| (record.physical_offset, record.queue_offset));
    for request in &round.requests {
        let place = round.place_of(request);
        let own = request.row.map_or((-1, -1), |_| places.next().expect("a record"));
        assert_eq!((place.physical, place.in_queue), own);
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn what_was_sent_is_what_is_stored(
        (of_each, halves) in kinds_and_halves(), code in code(), rules in rules(), place in place(), gap in 0..9usize,
    ) {
        let log = Log::of(&halves, &rules, place);
        let of_each = of_log(of_each, &log);
        let buffer = laid_out(&of_each, code, gap);
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &log.served(&[code, END]), &rules, &hosts, WIDE);
        prop_assert!(round.requests.iter().all(|request| round.place_of(request).physical == -1));
        assert_is_what_was_sent(&mut round, &of_each, &buffer, &rules, &hosts, &log);
    }

    /// What is left is what would have been read of shorter spans.
    #[test]
    fn what_is_left_is_what_was_good(
        (of_each, halves) in kinds_and_halves(), code in code(), place in place(),
        turns in vec((vec(prop::bool::weighted(0.7), 0..24), vec(prop::bool::weighted(0.7), 0..12)), 1..3),
    ) {
        let rules = usual_rules(true, 8, "CLUSTER\x01c\x02");
        let log = Log::of(&halves, &rules, place);
        let mut left = of_log(of_each, &log);
        let buffer = laid_out(&left, code, 2);
        let hosts = hosts(left.len());
        let hosts = as_slices(&hosts);
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &log.served(&[code, END]), &rules, &hosts, WIDE);
        for (good, real) in turns {
            let names = queues(&round);
            let reals: Vec<_> = round.real_places().map(|(topic, queue_id)| (topic.to_owned(), queue_id)).collect();
            let is_in = |names: &[(String, i32)], good: &[bool], wanted: Option<(String, i32)>| {
                wanted.is_none_or(|wanted| {
                    // of one that is not known nothing is said: it is not good
                    let number = names.iter().position(|name| *name == wanted);
                    number.and_then(|number| good.get(number)) == Some(&true)
                })
            };
            let is_good = |sent: &Sent| is_in(&names, &good, sent.queue(&log)) && is_in(&reals, &real, sent.real(&log));
            left = left.iter().map(|all| all.iter().take_while(|sent| is_good(sent)).cloned().collect()).collect();
            round.leave_out(&buffer.spans, &good, &real);
        }
        assert_is_what_was_sent(&mut round, &left, &buffer, &rules, &hosts, &log);
    }

    #[test]
    fn no_more_halves_than_asked_for(of_each in vec(vec(kind(), 0..6), 1..4), most in 0..6usize) {
        let rules = usual_rules(true, 8, "");
        let log = Log::of(&[], &rules, (0, 0, 0));
        let mut of_each = of_log(of_each, &log);
        let buffer = laid_out(&of_each, 310, 1);
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let served = Served { halves: most, ..log.served(&[310, END]) };
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &served, &rules, &hosts, WIDE);
        let mut left = most;
        for sent in &mut of_each {
            let count = sent
                .iter()
                .take_while(|one| {
                    let is_half = matches!(one, Sent::Half(_));
                    let is_served = !is_half || left > 0;
                    left -= usize::from(is_half && is_served);
                    is_served
                })
                .count();
            sent.truncate(count);
        }
        assert_is_what_was_sent(&mut round, &of_each, &buffer, &rules, &hosts, &log);
    }

    /// Each field that says which half a record is, and its body: where one has changed, the record is none.
    #[test]
    fn a_damaged_half_is_not_ended(
        half in stored(), commit in any::<bool>(), form in form(), at in any::<Index>(), mask in 1..=255u8, place in place(),
    ) {
        let rules = usual_rules(true, 8, "");
        let log = Log::of(&[half], &rules, place);
        let sent = Sent::End(0, log.end(0, if commit { 8 } else { 12 }, form));
        assert_served(&sent, &log, &rules);
        let Record { ref born_host, ref store_host, ref body, ref topic, size, .. } = log.halves[0].record;
        let body_at = 72 + born_host.len() + store_host.len();
        let body_end = body_at + body.len();
        let mut checked: Vec<usize> = (0..16).chain(20..36).collect();
        // the size of the body, itself, the topic with its size and the size of the properties
        checked.extend(body_at - 4..body_end + 1 + topic.len() + 2);
        let mut damaged = log.clone();
        let begin = log.bytes.len() - size;
        damaged.bytes[begin + checked[at.index(checked.len())]] ^= mask;
        assert_left(&sent.frame(310), 310, &damaged, &rules);
        let mut marked = log.clone();
        marked.bytes[begin + 39] |= [4, 8, 12][at.index(3)]; // a kind of transaction in its sysFlag
        assert_left(&sent.frame(310), 310, &marked, &rules);
        for hosts in [0x10, 0x20] {
            let mut other = log.clone();
            other.bytes[begin + 39] ^= hosts;
            assert_left(&sent.frame(310), 310, &other, &rules);
        }
        let mut cut = log.clone();
        cut.bytes.pop();
        assert_left(&sent.frame(310), 310, &cut, &rules);
    }

    /// Where a half that is read by itself is one, a round says so too.
    #[test]
    fn a_request_of_a_transaction_on_its_own(send in half(), half in stored(), form in form(), code in code()) {
        let rules = usual_rules(true, 8, "");
        let log = Log::of(&[half], &rules, (0, 0, 0));
        for frame in [send.frame(code), log.end(0, 8, form).frame()] {
            let binary = frame[4] == 1;
            let mut arena = Vec::new();
            let expected = (!binary).then_some(Alone::OfTransaction);
            prop_assert_eq!(Single::read(&frame, &[code, END], &mut arena), expected);
            prop_assert_eq!(Single::read(&frame, &[code ^ 5], &mut arena), None);
            let longer = [&frame[..], b"x"].concat();
            prop_assert_eq!(Single::read(&longer, &[code, END], &mut arena), None);
        }
    }

    #[test]
    fn plain_replies(opaque in any::<i32>(), binary in any::<bool>(), before in vec(any::<u8>(), 0..9)) {
        let mut out = before.clone();
        reply::plain(&mut out, &usual_rules(true, 8, ""), opaque, binary);
        prop_assert_eq!(&out[..before.len()], &before[..]);
        let found = replies(&out[before.len()..]);
        prop_assert_eq!(found.len(), 1);
        prop_assert_eq!((found[0].binary, found[0].opaque, found[0].fields.len()), (binary, opaque, 0));
    }
}

// -- what is served and what is handed back

fn other_send() -> Sent {
    let properties = vec![pair("UNIQ_KEY", "B2")];
    Sent::Send(Send { properties, sys_flag: 0, ..a_half() })
}

fn a_half() -> Send {
    Send {
        opaque: 3,
        topic: "Orders".into(),
        queue_id: 2,
        sys_flag: 4,
        born_timestamp: 5,
        flag: 6,
        reconsume_times: None,
        properties: vec![pair("UNIQ_KEY", "A1"), pair("TRAN_MSG", "true"), pair("PGROUP", GROUP), pair("KEYS", "a b")],
        body: b"body".to_vec(),
        form: Form::plain(false),
    }
}

fn a_stored() -> Half {
    let record = Record {
        size: 0,
        magic: 0xDAA3_20A7,
        body_crc: 0,
        queue_id: 0,
        flag: 6,
        queue_offset: 0,
        physical_offset: 0,
        sys_flag: 0,
        born_timestamp: 5,
        born_host: vec![1; 8],
        store_timestamp: 9,
        store_host: vec![2; 8],
        reconsume_times: 0,
        prepared_transaction_offset: 0,
        body: b"body".to_vec(),
        topic: HALF_TOPIC.into(),
        properties: vec![],
    };
    let mut properties = a_half().properties;
    properties.extend([pair("__transactionId__", "A1"), pair("REAL_TOPIC", "Orders"), pair("REAL_QID", "2")]);
    Half { properties: vec![], record }.with(properties)
}

/// A request is served, with one behind it, and is what it should be.
fn assert_served(sent: &Sent, log: &Log, rules: &Rules) {
    let of_each = [vec![sent.clone(), other_send()]];
    let buffer = laid_out(&of_each, 310, 1);
    let hosts: [&[u8]; 1] = [&[7; 8]];
    let mut round = Round::read(&buffer.bytes, &buffer.spans, &log.served(&[310, END]), rules, &hosts, WIDE);
    assert_is_what_was_sent(&mut round, &of_each, &buffer, rules, &hosts, log);
}

fn assert_left(frame: &[u8], code: u16, log: &Log, rules: &Rules) {
    assert_left_by(frame, &log.served(&[code, END]), rules, WIDE);
}

/// A request is handed back, with what is behind it. It leaves no trace: the rest is as it would be without its span.
fn assert_left_by(frame: &[u8], served: &Served<'_>, rules: &Rules, limits: Limits) {
    let other = other_send().frame(served.codes[0]);
    let buffer = side_by_side(&[vec![frame.to_vec(), other.clone()], vec![other]], 1);
    let begin = buffer.spans[0].place.start;
    let hosts: [&[u8]; 2] = [&[7; 8], &[8; 8]];
    let round = Round::read(&buffer.bytes, &buffer.spans, served, rules, &hosts, limits);
    assert_eq!((round.parts[0].count, round.parts[0].stop), (0, begin));
    let spans = [Span { place: begin..begin, most: 9 }, buffer.spans[1].clone()];
    let without = Round::read(&buffer.bytes, &spans, served, rules, &hosts, limits);
    assert_eq!(without.parts[1].count, 1);
    assert_eq!(format!("{round:?}"), format!("{without:?}"));
}

/// The end of a half at the begin of everything.
pub fn an_end(state: i32) -> End {
    let group = GROUP.to_owned();
    End { opaque: 7, group, offset: 0, physical: 0, state, oneway: false, form: Form::plain(state == 8) }
}

fn nothing() -> Log {
    Log { bytes: vec![], start: 0, states: vec![], first: 0, halves: vec![] }
}

#[test]
fn halves_that_are_handed_back() {
    let rules = usual_rules(true, 8, "MSG_REGION\x01DefaultRegion\x02TRACE_ON\x01true\x02");
    for binary in [false, true] {
        let half = Send { form: Form::plain(binary), ..a_half() };
        let with = |more: &[(&str, &str)]| {
            let mut half = half.clone();
            half.properties.extend(more.iter().map(|(name, value)| pair(name, value)));
            half
        };
        let without = |gone: &str| {
            let mut half = half.clone();
            half.properties.retain(|(name, _)| name != gone);
            half
        };
        let changed = |wanted: &str, other: &str| {
            let mut half = half.clone();
            half.properties.iter_mut().filter(|(name, _)| name == wanted).for_each(|one| one.1 = other.to_owned());
            half
        };
        for served in [
            half.clone(),
            with(&[("colour", "red"), ("TAGS", "a"), ("WAIT", "true"), ("__SHARDINGKEY", "s")]),
            without("KEYS"),
            changed("PGROUP", "other"),
            Send { reconsume_times: Some(0), ..half.clone() },
            Send { sys_flag: 0x707, ..half.clone() },
            Send { topic: "x".repeat(127), ..half.clone() },
            Send { queue_id: i32::MAX, ..half.clone() },
            Send { topic: String::new(), ..half.clone() }, // the caller looks at the real places
        ] {
            assert_served(&Sent::Half(served), &nothing(), &rules);
        }
        for left in [
            without("TRAN_MSG"),
            without("PGROUP"),
            without("UNIQ_KEY"),
            changed("TRAN_MSG", "false"),
            changed("TRAN_MSG", "TRUE"),
            changed("UNIQ_KEY", "a-b"),
            changed("UNIQ_KEY", &"A".repeat(257)),
            with(&[("WAIT", "false")]),
            with(&[("colour", "red"), ("colour", "red")]),
            with(&[("KEYS", "c")]),
            with(&[("UNIQ_KEY", "A1")]),
            with(&[("TRAN_MSG", "true")]),
            with(&[("PGROUP", GROUP)]),
            with(&[("MSG_REGION", "x")]),
            with(&[("TRACE_ON", "false")]),
            with(&[("__transactionId__", "A1")]),
            with(&[("REAL_TOPIC", "Orders")]),
            with(&[("REAL_QID", "2")]),
            with(&[("DELAY", "1")]),
            with(&[("__other", "1")]),
            with(&[("POP_CK", "1")]),
            with(&[("empty", "")]),
            Send { sys_flag: 0, ..half.clone() },
            Send { sys_flag: 8, ..half.clone() },
            Send { sys_flag: 12, ..half.clone() },
            Send { sys_flag: 0x14, ..half.clone() },
            Send { sys_flag: 0x24, ..half.clone() },
            Send { reconsume_times: Some(1), ..half.clone() },
            Send { reconsume_times: Some(-1), ..half.clone() },
            Send { topic: HALF_TOPIC.into(), ..half.clone() },
            Send { queue_id: -1, ..half.clone() },
            Send { body: vec![], ..half.clone() },
        ] {
            assert_left(&left.frame(310), 310, &nothing(), &rules);
        }
        assert_left(&Send { topic: HALF_TOPIC.into(), ..half.clone() }.frame(10), 10, &nothing(), &rules);
        let to_halves =
            Send { sys_flag: 0, topic: HALF_TOPIC.into(), properties: vec![pair("UNIQ_KEY", "A")], ..half.clone() };
        assert_left(&to_halves.frame(310), 310, &nothing(), &rules);
        let off = Rules { halves: false, ..usual_rules(true, 8, "") };
        assert_served(&other_send(), &nothing(), &off);
        assert_left(&half.frame(310), 310, &nothing(), &off);
        assert_left_by(&half.frame(310), &Served { halves: 0, ..nothing().served(&[310]) }, &rules, WIDE);
        assert_left_by(&half.frame(310), &nothing().served(&[10]), &rules, WIDE);
    }
}

/// Of names there may be as many as are compared with each other: those that are appended count too.
#[test]
fn halves_with_many_properties() {
    for (added, own) in [("", 29), ("MSG_REGION\x01r\x02TRACE_ON\x01true\x02", 27)] {
        let rules = usual_rules(true, 8, added);
        let mut half = a_half();
        half.properties.extend((half.properties.len()..own).map(|number| pair(&format!("p{number}"), "v")));
        assert_served(&Sent::Half(half.clone()), &nothing(), &rules);
        half.properties.push(pair("one", "more"));
        assert_left(&half.frame(310), 310, &nothing(), &rules);
    }
    let rules = usual_rules(true, 8, "");
    let stored = a_stored();
    let mut properties = stored.properties.clone();
    properties.extend((properties.len()..32).map(|number| pair(&format!("p{number}"), "v")));
    let log = Log::of(&[stored.clone().with(properties.clone())], &rules, (0, 0, 0));
    assert_served(&Sent::End(0, log.end(0, 8, Form::plain(false))), &log, &rules);
    properties.push(pair("one", "more"));
    let log = Log::of(&[stored.with(properties)], &rules, (0, 0, 0));
    assert_left(&log.end(0, 8, Form::plain(false)).frame(), 310, &log, &rules);
}

/// A half leaves room for what it gets when it is stored again.
#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn halves_with_long_properties() {
    for added in ["", "MSG_REGION\x01r\x02TRACE_ON\x01true\x02"] {
        let rules = usual_rules(true, 8, added);
        for over in [0, 1] {
            let mut half = a_half();
            let appended = "__transactionId__|A1|REAL_TOPIC|Orders|REAL_QID|2|".len() + added.len();
            let space = 32_767 - 128 - appended - half.text().len() - 3;
            half.properties.push(pair("p", &"v".repeat(space + over)));
            if over == 0 {
                assert_served(&Sent::Half(half), &nothing(), &rules);
            } else {
                assert_left(&half.frame(310), 310, &nothing(), &rules);
            }
        }
    }
}

#[test]
fn limits_of_halves_and_commit_records() {
    let rules = usual_rules(true, 8, "");
    let log = Log::of(&[a_stored()], &rules, (0, 0, 0));
    let (end, rollback) = (log.end(0, 8, Form::plain(false)), log.end(0, 12, Form::plain(true)));
    for sent in [Sent::Half(a_half()), Sent::End(0, end)] {
        let host: &[&[u8]] = &[&[7; 8]];
        let frame = sent.frame(310);
        let spans = [Span { place: 0..frame.len(), most: 9 }];
        let whole = Round::read(&frame, &spans, &log.served(&[310, END]), &rules, host, WIDE);
        for (body, record, is_served) in
            [(4, whole.rows.total(), true), (3, usize::MAX, false), (4, whole.rows.total() - 1, false)]
        {
            let round = Round::read(&frame, &spans, &log.served(&[310, END]), &rules, host, Limits { body, record });
            assert_eq!((round.requests.len() == 1, round.rows.total() > 0), (is_served, is_served));
        }
    }
    // a rollback stores nothing
    let frame = rollback.frame();
    let spans = [Span { place: 0..frame.len(), most: 9 }];
    let none = Limits { body: 0, record: 0 };
    let round = Round::read(&frame, &spans, &log.served(&[310, END]), &rules, &[&[7; 8]], none);
    assert_eq!((round.requests.len(), round.rows.len()), (1, 0));
}

#[test]
fn ends_that_are_handed_back() {
    let rules = usual_rules(true, 8, "MSG_REGION\x01r\x02TRACE_ON\x01true\x02");
    let log = Log::of(&[a_stored(), a_stored()], &rules, (1000, 50, 3));
    for binary in [false, true] {
        for state in [8, 12] {
            let end = log.end(1, state, Form::plain(binary));
            let left = |end: End, log: &Log| assert_left(&end.frame(), 310, log, &rules);
            assert_served(&Sent::End(1, end.clone()), &log, &rules);
            assert_served(&Sent::End(1, End { oneway: true, ..end.clone() }), &log, &rules);
            for other in [0, 4, -8, 9, 16, 24, 28, 8 + (1 << 16)] {
                left(End { state: other, ..end.clone() }, &log);
            }
            for group in ["", "pg", "PG2", "P"] {
                left(End { group: group.to_owned(), ..end.clone() }, &log);
            }
            for offset in [0, 49, 50, 52, -1, i64::MIN, i64::MAX] {
                left(End { offset, ..end.clone() }, &log);
            }
            for physical in [
                end.physical - 1,
                end.physical + 1,
                0,
                999,
                -1,
                i64::MIN,
                i64::MAX,
                log.end(0, 8, Form::plain(binary)).physical,
            ] {
                left(End { physical, ..end.clone() }, &log);
            }
            for ended_as in [1, 2, 3, 4, 5, 6, 16, 17, 128, 255] {
                let mut ended = log.clone();
                ended.states[1] = ended_as;
                left(end.clone(), &ended);
            }
            // outside of the window: of the log, and of the states
            left(end.clone(), &Log { bytes: log.bytes[..end.physical as usize - 1000].to_vec(), ..log.clone() });
            left(end.clone(), &Log { bytes: vec![], ..log.clone() });
            left(end.clone(), &Log { start: end.physical + 1, bytes: vec![], ..log.clone() });
            left(end.clone(), &Log { states: vec![0], ..log.clone() });
            left(end.clone(), &Log { states: vec![], ..log.clone() });
            left(end.clone(), &Log { first: 52, ..log.clone() });
            left(end.clone(), &Log { first: i64::MIN, ..log.clone() });
            left(end.clone(), &Log { start: i64::MIN, ..log.clone() });
            let off = Rules { halves: false, ..usual_rules(true, 8, "MSG_REGION\x01r\x02TRACE_ON\x01true\x02") };
            assert_left(&end.frame(), 310, &log, &off);
            assert_left_by(&end.frame(), &log.served(&[310]), &rules, WIDE);
            // as other clients may write it
            for (name, count) in [("producerGroup", 2), ("msgId", 2), ("zz", 1)] {
                let mut doubled = end.clone();
                doubled.form.others = vec![(name, "PG")];
                if count == 1 {
                    assert_served(&Sent::End(1, doubled), &log, &rules);
                } else {
                    left(doubled, &log);
                }
            }
        }
    }
}

/// The same half is not ended twice in a round, since the first end has not been stored yet.
#[test]
fn the_second_end_of_a_half_is_left() {
    let rules = usual_rules(true, 8, "");
    let log = Log::of(&[a_stored(), a_stored()], &rules, (0, 0, 0));
    for first in [8, 12] {
        for second in [8, 12] {
            let end = |number, state| Sent::End(number, log.end(number, state, Form::plain(false)));
            let sent =
                [vec![end(0, first), end(1, 8), end(0, second), end(1, 12)], vec![end(0, second)], vec![other_send()]];
            let buffer = laid_out(&sent, 310, 0);
            let hosts = hosts(3);
            let hosts = as_slices(&hosts);
            let mut round = Round::read(&buffer.bytes, &buffer.spans, &log.served(&[310, END]), &rules, &hosts, WIDE);
            let served = [sent[0][..2].to_vec(), vec![], sent[2].clone()];
            assert_is_what_was_sent(&mut round, &served, &buffer, &rules, &hosts, &log);
        }
    }
}

/// One that was handed back counts as no end: another connection may end the half.
#[test]
fn an_end_that_was_handed_back_does_not_count() {
    let rules = usual_rules(true, 8, "");
    let log = Log::of(&[a_stored()], &rules, (0, 0, 0));
    let end = log.end(0, 8, Form::plain(false));
    let wrong = End { group: "other".into(), ..end.clone() };
    let sent = [vec![Sent::End(0, wrong)], vec![Sent::End(0, end)]];
    let buffer = laid_out(&sent, 310, 0);
    let hosts: [&[u8]; 2] = [&[7; 8], &[8; 8]];
    let mut round = Round::read(&buffer.bytes, &buffer.spans, &log.served(&[310, END]), &rules, &hosts, WIDE);
    assert_is_what_was_sent(&mut round, &[vec![], sent[1].clone()], &buffer, &rules, &hosts, &log);
    // nor does a half that could not be stored
    let long = Send { body: vec![1; 101], ..a_half() };
    let sent = [vec![Sent::Half(long)], vec![Sent::Half(a_half())]];
    let buffer = laid_out(&sent, 310, 0);
    let served = Served { halves: 1, ..log.served(&[310]) };
    let limits = Limits { body: 100, record: usize::MAX };
    let mut round = Round::read(&buffer.bytes, &buffer.spans, &served, &rules, &hosts, limits);
    assert_is_what_was_sent(&mut round, &[vec![], sent[1].clone()], &buffer, &rules, &hosts, &log);
}

#[test]
fn properties_of_halves_that_are_ended() {
    let rules = usual_rules(true, 8, "");
    let stored = a_stored();
    let check = |properties: Vec<(String, String)>, of_commit: bool, of_rollback: bool| {
        let log = Log::of(&[stored.clone().with(properties.clone())], &rules, (7, 9, 2));
        for (state, is_served) in [(8, of_commit), (12, of_rollback)] {
            let end = log.end(0, state, Form::plain(state == 8));
            if is_served {
                assert_served(&Sent::End(0, end), &log, &rules);
            } else {
                assert_left(&end.frame(), 310, &log, &rules);
            }
        }
    };
    let without = |gone: &str| {
        let mut properties = stored.properties.clone();
        properties.retain(|(name, _)| name != gone);
        properties
    };
    let changed = |name: &str, value: &str| [without(name), vec![pair(name, value)]].concat();
    check(stored.properties.clone(), true, true);
    for name in ["KEYS", "TRAN_MSG", "__transactionId__"] {
        check(without(name), true, true);
    }
    for name in ["PGROUP", "REAL_TOPIC", "REAL_QID"] {
        check(without(name), false, false);
    }
    check(without("UNIQ_KEY"), false, true); // its keys are made by the full path
    for number in ["0", "7", "2147483647", "10"] {
        check(changed("REAL_QID", number), true, true);
    }
    for number in ["", "00", "01", "-1", "+1", " 1", "1 ", "2147483648", "99999999999999999999", "1x", "x", "１"] {
        check(changed("REAL_QID", number), false, false);
    }
    for topic in ["x", &"x".repeat(127), "T%|a_-"] {
        check(changed("REAL_TOPIC", topic), true, true);
    }
    check(changed("REAL_TOPIC", HALF_TOPIC), false, true);
    check(changed("REAL_TOPIC", &"x".repeat(128)), false, true);
    check(changed("REAL_TOPIC", ""), false, false);
    check(changed("PGROUP", "other"), false, false);
    // what the broker writes into halves that it stores again, and what keeps any message from this way
    for (name, value) in [("TRANS_OFFSET", "1"), ("DELAY", "1"), ("__other", "1"), ("WAIT", "false"), ("POP_x", "1")] {
        check([stored.properties.clone(), vec![pair(name, value)]].concat(), false, false);
    }
    for (name, value) in
        [("PGROUP", GROUP), ("REAL_TOPIC", "Orders"), ("REAL_QID", "2"), ("KEYS", "c"), ("TRAN_MSG", "true")]
    {
        check([stored.properties.clone(), vec![pair(name, value)]].concat(), false, false);
    }
    // what this broker adds to each message does not matter, but what another one adds does
    let added = [stored.properties.clone(), vec![pair("MSG_REGION", "x")]].concat();
    check(added.clone(), false, false);
    let rules = usual_rules(true, 8, "MSG_REGION\x01DefaultRegion\x02");
    let log = Log::of(&[stored.with(added)], &usual_rules(true, 8, ""), (0, 0, 0));
    assert_served(&Sent::End(0, log.end(0, 8, Form::plain(false))), &log, &rules);
}

#[test]
fn records_that_are_no_halves() {
    let rules = usual_rules(true, 8, "");
    let log = Log::of(&[a_stored()], &rules, (0, 0, 0));
    let end = log.end(0, 8, Form::plain(false));
    let of = |record: Record| Log { bytes: record.bytes(), ..log.clone() };
    let whole = &log.halves[0].record;
    assert_served(&Sent::End(0, end.clone()), &of(whole.clone()), &rules);
    let text = whole.properties.clone();
    let latin = [&text[..text.len() - 2], b"\xff\x02"].concat();
    let open = text[..text.len() - 1].to_vec();
    let body = vec![];
    for record in [
        Record { size: whole.size - 1, ..whole.clone() },
        Record { size: whole.size + 1, ..whole.clone() },
        Record { size: 0, ..whole.clone() },
        Record { size: 7, ..whole.clone() },
        Record { size: u32::MAX as usize, ..whole.clone() },
        Record { magic: 0xDAA3_20AB, ..whole.clone() }, // of longer topics
        Record { magic: 0xCBD4_3194, ..whole.clone() }, // the end of a file
        Record { body_crc: whole.body_crc ^ 1, ..whole.clone() },
        Record { body_crc: whole.body_crc | 0x8000_0000, ..whole.clone() },
        Record { queue_id: 1, ..whole.clone() },
        Record { queue_offset: 1, ..whole.clone() },
        Record { physical_offset: 1, ..whole.clone() },
        Record { sys_flag: 4, ..whole.clone() },
        Record { sys_flag: 8, ..whole.clone() },
        Record { sys_flag: 0x10, ..whole.clone() },
        Record { sys_flag: 0x40, ..whole.clone() },
        Record { topic: b"RMQ_SYS_TRANS_OP_HALF_TOPI".to_vec(), ..whole.clone() },
        Record { properties: latin, ..whole.clone() },
        Record { properties: open, size: whole.size - 1, ..whole.clone() },
        Record { body, size: whole.size - 4, body_crc: 0, ..whole.clone() },
    ] {
        assert_left(&end.frame(), 310, &of(record.clone()), &rules);
    }
    // its parts end before it does
    let longer = [&Record { size: whole.size + 1, ..whole.clone() }.bytes()[..], b"x"].concat();
    assert_left(&end.frame(), 310, &Log { bytes: longer, ..log.clone() }, &rules);
    for count in (0..whole.size).step_by(if cfg!(miri) { 40 } else { 1 }) {
        let cut = Log { bytes: whole.bytes()[..count].to_vec(), ..log.clone() };
        assert_left(&end.frame(), 310, &cut, &rules);
    }
}

/// Only a header in JSON that starts with its code is read: of others the code is not known yet.
#[test]
fn headers_that_start_otherwise_are_handed_back() {
    let rules = usual_rules(true, 8, "");
    let log = Log::of(&[a_stored()], &rules, (0, 0, 0));
    let frames = [other_send().frame(310), a_half().frame(310), log.end(0, 8, Form::plain(false)).frame()];
    for frame in frames {
        let head = std::str::from_utf8(&frame[8..frame.len() - if frame.ends_with(b"body") { 4 } else { 0 }]).unwrap();
        let body = &frame[8 + head.len()..];
        let code = if head.starts_with("{\"code\":37,") { "37" } else { "310" };
        let front = format!("{{\"code\":{code},");
        let rest = head.strip_prefix(&front).unwrap();
        let made = |front: &str| framed(format!("{front}{rest}").as_bytes(), 0, body);
        let spans = [Span { place: 0..made(&front).len(), most: 1 }];
        let found = Round::read(&made(&front), &spans, &log.served(&[310, END]), &rules, &[&[7; 8]], WIDE);
        assert_eq!(found.parts[0].count, 1);
        for other in [
            format!(" {front}"),
            format!("{{ \"code\":{code},"),
            format!("{{\"code\" :{code},"),
            format!("{{\"code\": {code},"),
            format!("{{\"code\":{code} ,"),
            format!("{{\"code\":0{code},"),
            format!("{{\"code\":-{code},"),
            format!("{{\"code\":\"{code}\","),
            format!("{{\"code\":{code}000,"),
            format!("{{\"code\":{code}000000,"),
            format!("{{\"version\":1,\"code\":{code},"),
            "{\"code\":,".to_owned(),
            "{".to_owned(),
        ] {
            assert_left(&made(&other), 310, &log, &rules);
        }
        // the code that it starts with is the one that it has
        let second = format!("{front}\"code\":{code},");
        assert_left(&made(&second), 310, &log, &rules);
    }
}
