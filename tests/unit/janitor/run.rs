//! When a janitor warns of a backlog.

use super::*;

#[test]
fn a_backlog_grows_when_it_is_older_three_times_in_a_row() {
    let mut backlog = Backlog::default();
    let after = |seconds: u64| Swept { oldest_after: Some(Duration::from_secs(seconds)), ..Swept::default() };
    let grown: Vec<bool> = [1, 2, 3, 4, 1, 2, 3, 4].map(|seconds| backlog.grows(&after(seconds))).into();
    assert_eq!(grown, [false, false, true, true, false, false, false, true]);
    assert!(!backlog.grows(&Swept::default()), "nothing is due");
}
