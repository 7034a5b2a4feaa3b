//! What strangers send is looked at once: work that grows with the square of it takes too long in these tests.
//!
//! The inputs have hundreds of thousands of parts. In one look each takes a fraction of a second, without optimization too;
//! with a look at all the others for each part, many seconds to hours.

use std::time::{Duration, Instant};

use trimq_native_core::batch;
use trimq_native_core::header::{send_in_binary, send_in_json};
use trimq_native_core::index::{put, Entry};
use trimq_native_core::round::{Round, Span};
use trimq_native_core::rows::Stamp;

use crate::batches::{body_of, Message};
use crate::frames::{as_slices, hosts, sends_of, usual_rules, Form, Send};
use crate::round_trip::{queues, AT, WIDE};

const MANY: usize = 1 << 18;
const SOON: Duration = Duration::from_secs(5);

fn soon<T>(work: impl FnOnce() -> T) -> T {
    let begin = Instant::now();
    let result = work();
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    result
}

fn header(properties: &str, more: &str) -> Vec<u8> {
    format!(
        r#"{{"code":310,"extFields":{{"a":"g","b":"T","c":"T","d":"4","e":"1","f":"0","g":"1","h":"0","i":"{properties}"{more}}}}}"#
    )
    .into_bytes()
}

#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn long_headers() {
    let read = |head: &[u8]| {
        soon(|| send_in_json(head, 310, &mut Vec::new()).is_some())
            | soon(|| send_in_binary(head, 310, &mut Vec::new()).is_some())
    };
    assert!(read(&header(&r"\u0001".repeat(MANY), "")));
    assert!(read(&header(&r"\ud83d\ude00".repeat(MANY), "")));
    assert!(read(&header("x", &r#","z":1"#.repeat(MANY))));
    assert!(read(&header("x", &" ".repeat(MANY))));
    assert!(!read(&header(&r"\".repeat(2 * MANY + 1), "")));
    assert!(!read(&header("x", &r#","z":{"#.repeat(MANY))));
    assert!(!read(&"{".repeat(MANY).into_bytes()));
    assert!(!read(&format!("{{\"code\":{}", "1".repeat(MANY)).into_bytes()));
}

#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn long_properties() {
    let names = usual_rules(true, 8, "").names;
    for text in ["\x01".repeat(MANY), "\x02".repeat(MANY), "a".repeat(MANY), "a\x01".repeat(MANY), "a\x02".repeat(MANY)]
    {
        assert!(soon(|| names.ordinary(&text)).is_none());
        let is_one = text.starts_with("a\x01");
        assert_eq!(soon(|| names.ordinary_in_batch(&text)).is_some(), is_one);
    }
    for text in ["a\x01b\x02", "KEYS\x01b\x02", "__SHARDINGKEY\x01b\x02"] {
        let text = text.repeat(MANY);
        assert!(soon(|| names.ordinary(&text)).is_some() && soon(|| names.ordinary_in_batch(&text)).is_some());
    }
}

fn sends(count: usize, queues: i32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for number in 0..count as i32 {
        let send = Send {
            opaque: number,
            topic: "T".into(),
            queue_id: number % queues,
            sys_flag: 0,
            born_timestamp: 0,
            flag: 0,
            reconsume_times: None,
            properties: vec![("UNIQ_KEY".into(), "A".into()), ("KEYS".into(), "a b c".into())],
            body: b"b".to_vec(),
            form: Form::plain(number % 2 == 0),
        };
        bytes.extend(send.frame(310));
    }
    bytes
}

#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn many_frames() {
    let rules = usual_rules(true, 8, "x\x01y\x02");
    let count = 1 << 16;
    for (of_queues, connections) in [(1, 1), (i32::MAX, 1), (i32::MAX, count)] {
        let bytes = sends(count, of_queues);
        let mut spans = vec![Span { place: 0..bytes.len(), most: usize::MAX }];
        if connections > 1 {
            let hosts = hosts(1);
            let whole = Round::read(&bytes, &spans, &sends_of(&[310]), &rules, &as_slices(&hosts), WIDE);
            assert_eq!(whole.parts[0].count, count);
            let mut at = 0;
            spans.clear();
            while at < bytes.len() {
                let end = at + 4 + u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
                spans.push(Span { place: at..end, most: 1 });
                at = end;
            }
        }
        let hosts = vec![vec![1; 8]; spans.len()];
        let hosts = as_slices(&hosts);
        let mut round = soon(|| Round::read(&bytes, &spans, &sends_of(&[310]), &rules, &hosts, WIDE));
        assert_eq!(round.requests.len(), count);
        let mut good = vec![true; queues(&round).len()];
        let last = good.len() - 1;
        good[last] = of_queues == 1;
        soon(|| round.leave_out(&spans, &good, &[]));
        let starts = vec![0; round.rows.queues().len()];
        let mut out = vec![0; round.rows.total()];
        soon(|| round.write(&bytes, &mut out, &AT, &starts, &rules, &hosts)).unwrap();
        assert_eq!(soon(|| round.replies(&rules)).len(), spans.len());
    }
}

#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn a_long_batch() {
    let message =
        Message { flag: 0, body: b"b".to_vec(), properties: vec![("KEYS".into(), "a ".repeat(99))], open: true };
    let one = body_of(&[message]);
    let mut body = one.repeat(1 << 15);
    let rules = usual_rules(true, 8, "");
    let read = |body: &[u8]| soon(|| batch::read(body, "T", 1, Stamp::default(), &rules, &[&[1; 8]], WIDE).is_some());
    assert!(read(&body));
    body.pop();
    assert!(!read(&body));
    // lengths of nothing at all
    assert!(!read(&vec![0; MANY]));
}

#[test]
#[cfg_attr(miri, ignore = "long, interpreted")]
fn one_chain_of_all_entries() {
    let entries = (0..MANY as i32).map(|at| Entry { hash: 7, physical: i64::from(at), seconds: 0 });
    let mut file = vec![0; 40 + 4 + 20 * (MANY + 1)];
    assert_eq!(soon(|| put(&mut file, 1, 1, entries)), Some(1));
}
