//! The list of headers that the SQL function `idempotency.complete` shares with the layer.

use super::NEVER_REPLAYED;

/// SQL cannot share the list of Rust.
#[test]
fn the_function_complete_refuses_the_same_headers_as_replay_header() {
    let file = include_str!("../../../migrations/any-language.sql");
    let (_, list) = file.split_once("never_replayed constant text :=").expect("the list");
    let (list, _) = list.split_once(';').expect("the end of the list");
    let literals: String = list.split('\'').skip(1).step_by(2).collect();
    let of_the_function: Vec<_> = literals.split(", ").collect();
    let mut of_the_layer = NEVER_REPLAYED.map(|name| name.as_str().to_owned());
    of_the_layer.sort_unstable();
    assert_eq!(of_the_function, of_the_layer);
}
