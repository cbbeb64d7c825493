//! Fingerprints: which bodies are the same. `script/prove` runs this file again with serde_json's `preserve_order` and
//! `arbitrary_precision`, which another crate may turn on: the digests in this file must not change.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use pg_idempotency::{Fingerprint, InvalidBody};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

fn of<T: Serialize + ?Sized>(value: &T) -> Fingerprint {
    Fingerprint::of_json(value).expect("a fingerprint")
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

fn hex(fingerprint: Fingerprint) -> String {
    fingerprint.as_bytes().iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a String takes it");
        hex
    })
}

/// The digests are `printf 'j%s' '<canonical>' | sha256sum`, behind the version byte.
#[test]
fn the_digest_is_sha256_of_the_canonical_form() {
    for (value, digest) in [
        // j{"a":1,"b":2}
        (parsed(r#"{"b": 2, "a": 1.0}"#), "0ebc30991efbff184777934b7771114b5e35ed5f6b461f55e794c638ea11337d"),
        // j[null,true,"\"\\\u0000é",1.5,-3,18446744073709551615,1e300]
        (
            parsed(r#"[null, true, "\"\\\u0000\u00e9", 1.50, -3, 18446744073709551615, 1e300]"#),
            "012bee0d7ce3f9b7d47a781d993841c0a4a309f148afc08ffeec6335f53d9fe8",
        ),
    ] {
        assert_eq!(hex(of(&value)), format!("01{digest}"));
    }
    // printf '%s' '{"a":1}' | sha256sum
    assert_eq!(
        hex(Fingerprint::of_bytes(br#"{"a":1}"#)),
        "03015abd7f5cc57a2dd94b7590f04ad8084273905ee33ec5cebeae62276a97f862"
    );
}

#[test]
fn a_float_is_its_shortest_digits() {
    for (float, digits) in
        [(0.1, "0.1"), (f64::MIN_POSITIVE, "22250738585072014e-324"), (2_f64.powi(53), "9007199254740992")]
    {
        assert_eq!(of(&float).as_bytes()[1..], digest_of(digits), "{float:e}");
    }
    // The digits of an `f32` are its own: next to an `f64` this is 0.10000000149011612.
    assert_eq!(of(&0.1_f32).as_bytes()[1..], digest_of("0.1"));
}

fn raw(text: &str) -> Box<serde_json::value::RawValue> {
    serde_json::value::RawValue::from_string(text.to_owned()).expect("JSON")
}

#[test]
fn raw_json_in_a_body_is_compared_as_json() {
    let body = |text| BTreeMap::from([("a", raw(text))]);
    assert_eq!(of(&body(r#" {"c": 1.50, "b": [ ] } "#)), of(&json!({"a": {"b": [], "c": 1.5}})));
    assert_ne!(of(&body("9007199254740993.0")), of(&body("9007199254740992.0")));
}

#[derive(Serialize, Deserialize)]
struct Payment {
    currency: String,
    amount: u64,
    note: Option<String>,
    lines: Vec<(u32, f64)>,
    method: Method,
}

#[derive(Serialize, Deserialize)]
enum Method {
    Cash,
    Card { token: String, expires: (u16, u8) },
    Transfer(String),
    Split(u8, u8),
}

#[test]
fn a_struct_a_map_and_their_value_are_one_request() {
    for method in [
        Method::Cash,
        Method::Card { token: "t".to_owned(), expires: (2027, 1) },
        Method::Transfer("iban".to_owned()),
        Method::Split(1, 2),
    ] {
        let payment = Payment {
            currency: "EUR".to_owned(),
            amount: 9_007_199_254_740_993,
            note: None,
            lines: vec![(1, 0.1), (2, 1e21), (3, 5.0)],
            method,
        };
        let value = serde_json::to_value(&payment).expect("JSON");
        let text = serde_json::to_string_pretty(&payment).expect("JSON");
        assert_eq!(of(&payment), of(&value));
        assert_eq!(of(&payment), of(&parsed(&text)));
    }
    let map: HashMap<_, _> = (0..100).map(|n| (n, n)).collect();
    let sorted: BTreeMap<_, _> = (0..100).map(|n| (n.to_string(), n)).collect();
    assert_eq!(of(&map), of(&sorted), "integers as names are their text");
    assert_eq!(of(&HashMap::from([(true, 'x')])), of(&json!({"true": "x"})));
}

#[test]
fn members_are_sorted_by_code_points() {
    // U+FF61 is less than U+1F980 as a code point, and greater in UTF-16 units.
    let canonical = "j{\"\":0,\"\\\"\":1,\"a\":2,\"é\":3,\"\u{ff61}\":4,\"\u{1f980}\":5}";
    let value = json!({"\u{1f980}": 5, "\u{ff61}": 4, "é": 3, "a": 2, "\"": 1, "": 0});
    use sha2::Digest as _;
    assert_eq!(of(&value).as_bytes()[1..], *sha2::Sha256::digest(canonical.as_bytes()).as_slice());
}

#[test]
fn a_body_that_cannot_be_encoded_is_refused() {
    struct Broken;

    impl Serialize for Broken {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom("broken"))
        }
    }

    let refused = |body: Result<Fingerprint, InvalidBody>| matches!(body, Err(InvalidBody::Serialize(_)));
    assert!(refused(Fingerprint::of_json(&BTreeMap::from([((1, 2), 3)]))), "a key that is no string");
    assert!(refused(Fingerprint::of_json(&[Some(Broken)])));
}

/// serde_json writes them so.
#[test]
fn a_float_that_is_not_finite_is_null() {
    for float in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(of(&[float]), of(&parsed("[null]")));
    }
}

fn digest_of(canonical: &str) -> Vec<u8> {
    use sha2::Digest as _;
    sha2::Sha256::digest(format!("j{canonical}")).to_vec()
}
