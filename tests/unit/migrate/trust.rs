//! Tests that a release with a changed `migrations/any-language.sql` has another number, and that a change leaves the
//! names and the arguments.

use sha2::{Digest as _, Sha256};

use super::{FUNCTIONS, ours};

/// The digest of each file that a release has, under its number. The last line may change until a release has it.
const RELEASED: [(u32, &str); 1] = [(1, "ec4b2ca886fec032b45faf58944a02e823259533c5ca914e2f90b62f8fc02832")];

/// A process of another release calls the functions by these.
const SIGNATURES: [&str; 7] = [
    "version() returns int4",
    "fingerprint(request bytea) returns bytea",
    "try_claim(text, text, text, int8, bytea, interval, int8) returns boolean",
    "store_response(text, text, text, int8, bytea, int2, text) returns void",
    "ensure( scope text, operation text, value text, fingerprint bytea, retention interval default '24 hours', \
     wait interval default null, out outcome text, out token int8, out status int4, out headers jsonb, \
     out body bytea, out retry_after interval )",
    "complete( scope text, operation text, value text, token int8, status int4 default null, headers jsonb \
     default null, body bytea default null ) returns void",
    "run( scope text, operation text, value text, fingerprint bytea, effect regproc, argument jsonb, retention \
     interval default '24 hours', wait interval default null, out outcome text, out status int4, out headers \
     jsonb, out body bytea, out retry_after interval )",
];

#[test]
fn another_file_has_another_number() {
    let (number, digest) = *RELEASED.last().expect("a file");
    let read = hex::encode(Sha256::digest(FUNCTIONS.replace('\r', "")));
    assert_eq!(
        (ours(), &*read),
        (number, digest),
        "if a release has this file, raise the number in the file, and add a line above"
    );
    assert!(RELEASED.iter().zip(1..).all(|((number, _), place)| *number == place), "{RELEASED:?}");
}

#[test]
fn names_and_arguments_stay() {
    let signatures: Vec<String> = FUNCTIONS
        .split("\ncreate or replace function idempotency.")
        .skip(1)
        .filter_map(|function| {
            Some(function.split_once("language ")?.0.split_whitespace().collect::<Vec<_>>().join(" "))
        })
        .collect();
    assert_eq!(signatures, SIGNATURES);
}
