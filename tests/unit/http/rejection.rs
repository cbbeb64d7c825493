//! Rejections that repeat are logged once a minute.

use super::*;

#[test]
fn one_line_a_minute_is_written_and_says_how_many_were_left_out() {
    let (seldom, start) = (Seldom::default(), Instant::now());
    let due =
        |operation, seconds| seldom.due_at(Some(operation), "indeterminate", start + Duration::from_secs(seconds));
    assert_eq!(due("POST /texts", 0), Some(0));
    assert_eq!((due("POST /texts", 1), due("POST /texts", 59)), (None, None));
    assert_eq!(due("POST /payments", 59), Some(0));
    assert_eq!((due("POST /texts", 60), due("POST /texts", 120)), (Some(2), Some(0)));
}

#[test]
fn however_many_operations_clients_make_the_lines_are_bounded() {
    let (seldom, start) = (Seldom::default(), Instant::now());
    let written = (0..10_000).filter(|n| seldom.due_at(Some(&n.to_string()), "unavailable", start).is_some()).count();
    assert_eq!(written, KINDS + 1);
    assert_eq!(seldom.due_at(Some("another"), "unavailable", start + PACE), Some(0), "the old ones are forgotten");
}
