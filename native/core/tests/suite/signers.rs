//! Signatures: a user is named for his own signature and nothing else, whatever the bytes are.

use hmac::{Hmac, Mac};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, Index};
use sha1::Sha1;
use trimq_native_core::round::{Part, Span};
use trimq_native_core::signers::{Asked, Signers, Stamped};
use trimq_native_core::stamp::Stamp;

use crate::config;
use crate::frames::{framed, quoted, Escape, Field, Form};

const USERS: [(&str, &str); 3] = [("app", "12345678"), ("Jürgen", "gehäim"), ("other", "")];
const MARK: &[u8] = b"tmq1:";
const NO_USER: &[u8] = b"of no user";

fn signers() -> Signers {
    let mut signers =
        Signers::new(vec![(10, "topic".into()), (310, "b".into()), (37, "topic".into())], MARK.to_vec(), NO_USER);
    for (number, (name, secret)) in USERS.iter().enumerate() {
        assert_eq!(signers.add(name, secret.as_bytes(), false), number);
    }
    signers
}

/// The signature, in the plainest way: base64 has its own test.
fn signature(secret: &str, fields: &[(String, String)], body: &[u8], version: i32) -> String {
    let mut sorted = fields.to_vec();
    sorted.sort();
    let mut text = String::new();
    for (name, value) in sorted {
        if name != "Signature" && (name != "_UNIQUE_KEY_QUERY" || version > 393) {
            text += &value;
        }
    }
    let mut mac = Hmac::<Sha1>::new_from_slice(secret.as_bytes()).unwrap();
    mac.update(text.as_bytes());
    mac.update(body);
    let digest = mac.finalize().into_bytes();
    let letters: Vec<char> = ('A'..='Z').chain('a'..='z').chain('0'..='9').chain(['+', '/']).collect();
    let bits: Vec<u8> = digest.iter().flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1)).collect();
    let six = |bits: &[u8]| (0..6).fold(0, |value, at| value << 1 | bits.get(at).copied().unwrap_or(0));
    bits.chunks(6).map(|bits| letters[usize::from(six(bits))]).chain(['=']).collect()
}

fn json(code: u16, version: i32, fields: &[(String, String)], escapes: &[Escape]) -> Vec<u8> {
    // A name, a topic or a signature with escapes is left.
    let escapes = |name: &str| match name {
        "AccessKey" | "Signature" | "topic" | "b" => vec![Escape::Raw],
        _ => escapes.to_vec(),
    };
    let ext: Vec<String> =
        fields.iter().map(|(name, value)| format!("\"{name}\":{}", quoted(value, &escapes(name)))).collect();
    format!("{{\"code\":{code},\"extFields\":{{{}}},\"flag\":0,\"opaque\":7,\"version\":{version}}}", ext.join(","))
        .into_bytes()
}

/// A signed request.
#[derive(Clone, Debug)]
struct Request {
    code: u16,
    version: i32,
    user: usize,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
    escapes: Vec<Escape>,
    stamp: Option<Stamp>,
}

impl Request {
    fn frame(&self) -> Vec<u8> {
        framed(&json(self.code, self.version, &self.fields, &self.escapes), 0, &self.body)
    }

    fn topic(&self) -> Option<&str> {
        let name = if self.code == 310 { "b" } else { "topic" };
        self.fields.iter().find(|(field, _)| field == name).map(|(_, value)| value.as_str())
    }
}

fn request() -> impl Strategy<Value = Request> {
    let name = select(vec!["a", "c", "i", "Z", "properties", "_UNIQUE_KEY_QUERY", "SecurityToken", "zz"]);
    let fields = vec((name, any::<String>()), 0..6);
    let escape = select(vec![Escape::Raw, Escape::Short, Escape::Lower, Escape::Upper]);
    let code = select(vec![10u16, 310, 37]);
    let version = select(vec![0, 393, 394, 479, -1]);
    let rest = (vec(any::<u8>(), 0..200), vec(escape, 1..4), any::<u32>(), any::<bool>(), option::of(stamp()));
    (code, version, 0..USERS.len(), fields, rest).prop_map(|(code, version, user, fields, rest)| {
        let (body, escapes, turn, has_topic, stamp) = rest;
        let mut named: Vec<(String, String)> = vec![("AccessKey".into(), USERS[user].0.into())];
        for (name, value) in fields {
            if named.iter().all(|(known, _)| known != name) {
                named.push((name.into(), value));
            }
        }
        if let Some(stamp) = stamp {
            named.push(("!once".into(), text(&stamp)));
        }
        if has_topic {
            named.push((if code == 310 { "b" } else { "topic" }.into(), "T".into()));
        }
        named.push(("Signature".into(), signature(USERS[user].1, &named, &body, version)));
        let count = named.len();
        named.rotate_left(turn as usize % count);
        Request { code, version, user, fields: named, body, escapes, stamp }
    })
}

fn stamp() -> impl Strategy<Value = Stamp> {
    let sender = vec(select(b"AZaz09_-".to_vec()), 16).prop_map(|bytes| bytes.try_into().unwrap());
    (0..10_u64.pow(10), 0..10_u64.pow(15), sender, 0..10_u64.pow(18)).prop_map(|(code, time, sender, number)| Stamp {
        code,
        time,
        sender,
        number,
    })
}

fn text(stamp: &Stamp) -> String {
    let sender = std::str::from_utf8(&stamp.sender).unwrap();
    format!("tmq1:{}:{}:{sender}:{};", stamp.code, stamp.time, stamp.number)
}

#[test]
fn known_signatures() {
    // printf 'me3T' | openssl dgst -sha1 -hmac 12345678 -binary | base64 (and so on)
    for (secret, head, body, is_signed) in [
        (
            "12345678",
            r#""topic":"T","queueId":"3","AccessKey":"me","Signature":"TtH2/hLBnJwPlFcjUA+YvuD5L9g=""#,
            "",
            true,
        ),
        (
            "12345678",
            r#""topic":"T","queueId":3,"AccessKey":"me","Signature":"TtH2/hLBnJwPlFcjUA+YvuD5L9g=""#,
            "",
            true,
        ),
        (
            "12345678",
            r#""Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew=","topic":"T","queueId":"3","AccessKey":"me""#,
            "hello",
            true,
        ),
        (
            "12345678",
            r#""Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew=","topic":"T","queueId":"3","AccessKey":"me""#,
            "hullo",
            false,
        ),
        (
            "12345679",
            r#""Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew=","topic":"T","queueId":"3","AccessKey":"me""#,
            "hello",
            false,
        ),
        (
            "12345678",
            r#""Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew","topic":"T","queueId":"3","AccessKey":"me""#,
            "hello",
            false,
        ),
        ("12345678", r#""Signature":"","topic":"T","queueId":"3","AccessKey":"me""#, "hello", false),
        ("12345678", r#""topic":"T","queueId":"3","AccessKey":"me""#, "hello", false),
        ("12345678", r#""topic":"T","queueId":"3","Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew=""#, "hello", false),
        (
            "12345678",
            r#""topic":"T","queueId":"3","AccessKey":"you","Signature":"NdzXtCfE0JvArLSGmQUm0lUZ0Ew=""#,
            "hello",
            false,
        ),
    ] {
        let mut signers = Signers::new(vec![], MARK.to_vec(), NO_USER);
        signers.add("me", secret.as_bytes(), false);
        let head = format!(r#"{{"code":10,"extFields":{{{head}}},"version":505}}"#);
        assert_eq!(signers.signer(head.as_bytes(), body.as_bytes()), is_signed.then_some((0, None)), "{head} {body}");
    }
}

#[test]
fn a_query_by_unique_key_of_old_clients() {
    for (version, right, signature) in [
        (394, true, "c2uXFmztSIJnYKwvxyBbUYMQVqo="),
        (393, true, "q2PIvNKICsicJCtLrZPbGGYL1JQ="),
        (394, false, "q2PIvNKICsicJCtLrZPbGGYL1JQ="),
        (393, false, "c2uXFmztSIJnYKwvxyBbUYMQVqo="),
    ] {
        let mut signers = Signers::new(vec![], MARK.to_vec(), NO_USER);
        signers.add("me", b"12345678", false);
        let ext = format!(r#"{{"AccessKey":"me","_UNIQUE_KEY_QUERY":"true","Signature":"{signature}"}}"#);
        let head = format!(r#"{{"code":12,"extFields":{ext},"version":{version}}}"#);
        assert_eq!(signers.signer(head.as_bytes(), b"").is_some(), right);
    }
}

#[test]
fn a_mark_may_go_on_in_the_body() {
    let stamped = Some((0, Some(Stamp { code: 310, time: 1700000000000, sender: *b"AAAAAAAAAAAAAAAA", number: 7 })));
    for (body, user) in [
        (":", None),
        (":310", None),
        (":310:1700000000000:AAAAAAAAAAAAAAAA:7;", stamped),
        ("", Some((0, None))),
        ("-", Some((0, None))),
    ] {
        let mut signers = Signers::new(vec![], MARK.to_vec(), NO_USER);
        signers.add("tmq1", b"12345678", false);
        let mut fields: Vec<(String, String)> = vec![("AccessKey".into(), "tmq1".into())];
        fields.push(("Signature".into(), signature("12345678", &fields, body.as_bytes(), 479)));
        let head = json(10, 479, &fields, &[Escape::Raw]);
        assert_eq!(signers.signer(&head, body.as_bytes()), user, "{body}");
    }
}

#[test]
fn what_is_no_stamp_is_left() {
    let right = Stamp { code: 310, time: 1, sender: *b"AAAAAAAAAAAAAA_-", number: 999_999_999_999_999_999 };
    for (value, stamp) in [
        ("tmq1:310:1:AAAAAAAAAAAAAA_-:999999999999999999;", Some(right)),
        ("tmq1:0000000310:000000000000001:AAAAAAAAAAAAAA_-:999999999999999999;tmq1:", Some(right)),
        ("tmq1:00000000310:1:AAAAAAAAAAAAAA_-:999999999999999999;", None),
        ("tmq1:310:0000000000000001:AAAAAAAAAAAAAA_-:999999999999999999;", None),
        ("tmq1:310:1:AAAAAAAAAAAAAA_-:0999999999999999999;", None),
        ("tmq1:310:1:AAAAAAAAAAAAAA_+:999999999999999999;", None),
        ("tmq1:310:1:AAAAAAAAAAAAA_-:999999999999999999;", None),
        ("tmq1:310:1:AAAAAAAAAAAAAA_-;999999999999999999;", None),
        ("tmq1:310:1:AAAAAAAAAAAAAA_-:;", None),
        ("tmq1::1:AAAAAAAAAAAAAA_-:1;", None),
        ("tmq1:-1:1:AAAAAAAAAAAAAA_-:1;", None),
        ("tmq1:310:1:AAAAAAAAAAAAAA_-:1", None),
        ("tmq1:310:1:AAAAAAAA", None),
        ("tmq1:", None),
    ] {
        let mut fields = vec![("!once".into(), value.into()), ("AccessKey".into(), "app".into())];
        fields.push(("Signature".into(), signature("12345678", &fields, b"", 479)));
        let head = json(10, 479, &fields, &[Escape::Raw]);
        assert_eq!(signers().signer(&head, b""), stamp.map(|stamp| (0, Some(stamp))), "{value}");
    }
}

#[test]
fn a_user_who_needs_a_stamp() {
    let mut signers = Signers::new(vec![(10, "topic".into())], MARK.to_vec(), NO_USER);
    signers.add("free", b"", false);
    signers.add("app", b"12345678", true);
    let stamp = Stamp { code: 10, time: 1, sender: *b"AAAAAAAAAAAAAAAA", number: 7 };
    for stamp in [None, Some(stamp)] {
        let mut fields = vec![("AccessKey".into(), "app".into())];
        fields.extend(stamp.map(|stamp| ("!once".into(), text(&stamp))));
        fields.push(("Signature".into(), signature("12345678", &fields, b"", 479)));
        let head = json(10, 479, &fields, &[Escape::Raw]);
        let found = stamp.map(|stamp| (1, Some(stamp)));
        assert_eq!(signers.signer(&head, b""), found);
        let frame = framed(&head, 0, b"");
        assert_eq!(signers.asked(&frame).map(|(one, stamp)| (one.user, stamp)), found);
    }
}

#[test]
fn the_secret_of_no_user_signs_nothing() {
    let fields: Vec<(String, String)> = vec![("AccessKey".into(), "unknown".into())];
    let secret = std::str::from_utf8(NO_USER).unwrap();
    let signature = signature(secret, &fields, b"", 505);
    let head =
        format!(r#"{{"code":10,"extFields":{{"AccessKey":"unknown","Signature":"{signature}"}},"version":505}}"#);
    assert_eq!(signers().signer(head.as_bytes(), b""), None);
}

#[test]
fn what_could_be_read_in_two_ways_is_left() {
    let fields = |more: &[(&str, &str)]| -> Vec<(String, String)> {
        let all = [("AccessKey", "app"), ("topic", "T")].iter().chain(more);
        all.map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    };
    let head = |fields: &[(String, String)], harm: &dyn Fn(String) -> String| {
        let mut fields = fields.to_vec();
        fields.push(("Signature".into(), signature("12345678", &fields, b"", 505)));
        harm(String::from_utf8(json(10, 505, &fields, &[Escape::Raw])).unwrap())
    };
    let signers = signers();
    let read = |head: String| signers.signer(head.as_bytes(), b"").map(|(user, _)| user);
    assert_eq!(read(head(&fields(&[]), &|text| text)), Some(0));
    for (name, value, user) in [
        ("!once", "tmq1:", None),
        ("!once", "tmq1:310", None),
        ("!once", "tmq1", Some(0)),
        ("!once", "tmq2:", Some(0)),
        ("zz", "tmq1:", Some(0)),
    ] {
        assert_eq!(read(head(&fields(&[(name, value)]), &|text| text)), user, "{name} {value}");
    }
    assert_eq!(read(head(&fields(&[("!", "tmq"), ("!!", ""), ("!!!", "1:3")]), &|text| text)), None);
    assert_eq!(read(head(&fields(&[("é", "x")]), &|text| text)), None);
    for (old, new) in [
        (r#""topic":"T""#, r#""topic":"T","topic":"T""#),
        (r#""topic":"T""#, r#""topic":"T","topic":"""#),
        (r#""topic":"T""#, r#""topi\u0063":"T""#),
        (r#""topic":"T""#, r#""topic":"\ud800""#),
        (r#""topic":"T""#, r#""topic":["T"]"#),
        (r#""topic":"T""#, r#""topic":null"#),
        (r#""AccessKey":"app""#, r#""AccessKey":"\u0061pp""#),
        (r#""AccessKey":"app""#, r#""AccessKey":"app","AccessKey":"app""#),
        (r#""version":505"#, r#""version":505,"version":1"#),
        (r#""version":505"#, r#""version":505,"extFields":{}"#),
        (r#""version":505"#, r#""version":505,"code":11"#),
        (r#""version":505}"#, r#""version":505}}"#),
    ] {
        let changed = head(&fields(&[]), &|text| text.replace(old, new));
        assert!(changed.contains(new));
        assert_eq!(read(changed), None, "{new}");
    }
    let most: Vec<(String, String)> =
        fields(&[]).into_iter().chain((0..62).map(|number| (format!("f{number}"), "x".to_owned()))).collect();
    assert_eq!(read(head(&most, &|text| text)), None);
    assert_eq!(read(head(&most[..60], &|text| text)), Some(0));
}

#[test]
fn a_frame_in_binary() {
    let form = Form::plain(true);
    let mut fields: Vec<Field> = vec![("b", "T".into(), true), ("AccessKey", "Jürgen".into(), true)];
    let plain: Vec<(String, String)> =
        fields.iter().map(|(name, value, _)| ((*name).to_owned(), value.clone())).collect();
    fields.push(("Signature", signature("gehäim", &plain, b"body", 479), true));
    let frame = form.frame(310, 7, 0, fields.clone(), b"body");
    let signers = signers();
    assert_eq!(signers.asked(&frame), Some((Asked { user: 1, code: 310, topic: Some("T") }, None)));
    assert_eq!(signers.asked(&form.frame(310, 7, 0, fields.clone(), b"bodi")), None);
    for cut in 0..frame.len() {
        assert_eq!(signers.asked(&frame[..cut]), None);
    }
    fields.push(("b", "U".into(), true));
    assert_eq!(signers.asked(&form.frame(310, 7, 0, fields, b"body")), None);
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn a_signed_frame_is_of_its_user(request in request()) {
        let frame = request.frame();
        let expected = Asked { user: request.user, code: request.code, topic: request.topic() };
        prop_assert_eq!(signers().asked(&frame), Some((expected, request.stamp)));
    }

    #[test]
    fn one_other_byte_is_another_request(request in request(), at in any::<Index>(), mask in 1..=255u8) {
        let signers = signers();
        let mut frame = request.frame();
        let at = at.index(frame.len());
        frame[at] ^= mask;
        // Only fields that are not signed may differ: the rest of the envelope, and the names of fields in their order.
        if let Some((found, stamp)) = signers.asked(&frame) {
            prop_assert_eq!(stamp, request.stamp);
            let head = frame.len() - request.body.len();
            prop_assert!(at < head);
            prop_assert_eq!(found.user, request.user);
        }
    }

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..300), begin in 0..400usize, end in 0..400usize, most in 0..9usize) {
        let signers = signers();
        prop_assert_eq!(signers.asked(&bytes), None);
        prop_assert_eq!(signers.signer(&bytes, &bytes), None);
        let spans = [Span { place: begin..end, most }];
        let found = signers.round(&bytes, &spans, most);
        prop_assert_eq!(found[0].part, Part { count: 0, stop: begin });
    }

    #[test]
    fn a_round_is_read_to_the_first_frame_that_is_not_signed(
        requests in vec(vec((request(), any::<bool>()), 0..6), 1..4), own in 0..8usize, most in 0..12usize
    ) {
        let signers = signers();
        let mut bytes = vec![0; 3];
        let mut spans = vec![];
        let mut expected = vec![];
        let mut rest = most;
        for span in &requests {
            let begin = bytes.len();
            let mut part = Part { count: 0, stop: begin };
            let mut asked: Vec<(Asked<'_>, Part)> = vec![];
            let mut stamped: Vec<Stamped> = vec![];
            let mut ended = false;
            for (request, is_whole) in span {
                let mut frame = request.frame();
                if !is_whole {
                    let last = frame.len() - 1;
                    frame[last] ^= 1;
                }
                bytes.extend(&frame);
                let found = signers.asked(&frame).map(|(one, _)| Asked { topic: request.topic(), ..one });
                ended = ended || found.is_none() || part.count == own || rest == 0;
                if let (Some(found), false) = (found, ended) {
                    if !asked.iter().any(|(known, _)| *known == found) {
                        asked.push((found, part));
                    }
                    if let Some(stamp) = request.stamp {
                        stamped.push(Stamped { user: request.user, code: request.code, stamp, before: part });
                    }
                    part = Part { count: part.count + 1, stop: bytes.len() };
                    rest -= 1;
                }
            }
            bytes.extend([0, 0, 1]); // an incomplete frame
            spans.push(Span { place: begin..bytes.len(), most: own });
            expected.push((part, asked, stamped));
        }
        let found: Vec<_> =
            signers.round(&bytes, &spans, most).into_iter().map(|one| (one.part, one.asked, one.stamped)).collect();
        prop_assert_eq!(found, expected);
    }
}
