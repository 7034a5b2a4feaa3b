//! `leave_out`: queues that are not good, and what each connection has sent behind a message to one of them.

use proptest::collection::vec;
use proptest::prelude::*;
use trimq_native_core::round::Round;

use crate::config;
use crate::frames::{as_slices, code, hosts, laid_out, send, sends_of, usual_rules, Send};
use crate::round_trip::{assert_is, expected, queues, start_of, written, WIDE};

proptest! {
    #![proptest_config(config())]

    /// What is left is what would have been read of shorter spans.
    #[test]
    fn what_is_left_is_what_was_good(
        of_each in vec(vec(send(), 0..6), 1..5), code in code(), good in vec(prop::bool::weighted(0.7), 0..24),
        again in vec(prop::bool::weighted(0.8), 0..24),
    ) {
        let rules = usual_rules(true, 8, "CLUSTER\x01c\x02");
        let buffer = laid_out(&of_each, code, 2);
        let hosts = hosts(of_each.len());
        let hosts = as_slices(&hosts);
        let mut round = Round::read(&buffer.bytes, &buffer.spans, &sends_of(&[code]), &rules, &hosts, WIDE);
        let mut left = of_each;
        for good in [good, again] {
            let names = queues(&round);
            let is_good = |send: &Send| {
                let number = names.iter().position(|(topic, id)| *topic == send.topic && *id == send.queue_id);
                number.and_then(|number| good.get(number)) == Some(&true) // a queue that nothing is said of is not good
            };
            left = left.iter().map(|sends| sends.iter().take_while(|send| is_good(send)).cloned().collect()).collect();
            round.leave_out(&buffer.spans, &good, &[]);
        }
        for (number, sends) in left.iter().enumerate() {
            let part = round.parts[number];
            prop_assert_eq!(part.count, sends.len());
            let stops = &buffer.stops[number];
            let begin = buffer.spans[number].place.start;
            prop_assert_eq!(part.stop, sends.len().checked_sub(1).map_or(begin, |last| stops[last]));
        }
        let count: usize = left.iter().map(Vec::len).sum();
        prop_assert_eq!(round.rows.len(), count);
        prop_assert_eq!(round.requests.len(), count);
        if count == 0 {
            prop_assert_eq!(round.rows.total(), 0);
            prop_assert!(round.rows.queues().is_empty());
            prop_assert!(round.rows.hashes().is_empty());
            return Ok(());
        }
        let starts: Vec<i64> = queues(&round).iter().map(start_of).collect();
        let bytes = written(&mut round, &buffer, &rules, &hosts, &starts).unwrap();
        assert_is(&round, &bytes, &rules, &expected(&left, &rules, &hosts));
    }
}
