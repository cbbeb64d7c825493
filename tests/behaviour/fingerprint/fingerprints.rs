//! Fingerprints: which bodies are the same. `script/test` runs this file again with serde_json's `preserve_order` and
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
    // printf 'b%s' '{"a":1}' | sha256sum
    assert_eq!(
        hex(Fingerprint::of_bytes(br#"{"a":1}"#)),
        "019223a1a901b06bee1c3c4f66727edd04ae22e9f030a94d23d98f72049fbe0642"
    );
}

#[test]
fn the_same_request_has_the_same_fingerprint() {
    for (one, other) in [
        (r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#),
        (r#"{"a":{"x":[{"q":1,"p":2}],"w":3}}"#, r#"{ "a" : { "w" : 3, "x" : [ { "p":2, "q":1 } ] } }"#),
        ("1.0", "1"),
        ("-0.0", "0"),
        ("1e2", "100"),
        (r#""\u00e9\/""#, r#""é/""#),
    ] {
        assert_eq!(of(&parsed(one)), of(&parsed(other)), "{one} {other}");
    }
}

#[test]
fn another_request_has_another_fingerprint() {
    for (one, other) in [
        ("9007199254740993", "9007199254740992"),
        ("-9007199254740993", "-9007199254740992"),
        ("18446744073709551615", "18446744073709551614"),
        ("1", r#""1""#),
        ("[1,2]", "[2,1]"),
        ("[1,[2]]", "[[1],2]"),
        ("null", r#""null""#),
        ("[]", "{}"),
        (r#"{"a":null}"#, "{}"),
        ("0.1", "0.10000000000000002"),
        ("1", "-1"),
        (r#"{"a":"b"}"#, r#"{"a":["b"]}"#),
        (r#"["a\",\"b"]"#, r#"["a","b"]"#),
        ("true", r#""true""#),
    ] {
        assert_ne!(of(&parsed(one)), of(&parsed(other)), "{one} {other}");
    }
    assert_ne!(of("{}"), Fingerprint::of_bytes(b"{}"), "kinds do not mix");
    assert_ne!(Fingerprint::of_bytes(b"1"), Fingerprint::of_bytes(b"1 "));
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

/// Beyond `u128`, only serde_json's `arbitrary_precision` and raw JSON text keep the digits; then they count.
#[test]
fn longer_numbers_do_not_collide_if_their_digits_are_kept() {
    let [one, other] = [1, 2].map(|last| format!("12345678901234567890123456789012345678901234567890{last}"));
    assert_eq!(of(&parsed(&one)) != of(&parsed(&other)), parsed(&one) != parsed(&other));
    assert_ne!(of(&raw(&one)), of(&raw(&other)));
    assert_ne!(of(&u128::MAX), of(&(u128::MAX - 1)));
    assert_ne!(of(&i128::MIN), of(&(i128::MIN + 1)));
    assert_eq!(of(&1_u8), of(&1_i128));
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
fn a_string_is_escaped_only_if_json_requires_it() {
    let text: String = ('\0'..='\u{a0}').chain("\u{1f980}\u{1f}".chars()).collect();
    assert_eq!(of(&text).as_bytes()[1..], digest_of(&reference_string(&text)));
    for plain in ["", "é", "\u{7f}", "/"] {
        assert_eq!(of(plain).as_bytes()[1..], digest_of(&format!("\"{plain}\"")));
    }
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

#[test]
fn a_value_without_a_canonical_form_is_compared_by_its_text() {
    #[derive(Serialize)]
    struct Twice {
        a: u8,
        #[serde(flatten)]
        rest: BTreeMap<String, u8>,
    }
    let twice = |a, rest| of(&Twice { a, rest: BTreeMap::from([("a".to_owned(), rest)]) });
    assert_eq!(twice(1, 2), twice(1, 2));
    assert_ne!(twice(1, 2), twice(2, 1));
    assert_ne!(twice(1, 2), of(&json!({"a": 2})));

    let nested = |depth| of(&raw(&format!("{}{}", "[".repeat(depth), "]".repeat(depth))));
    assert_eq!(nested(100_000), nested(100_000));
    assert_ne!(nested(100_000), nested(100_001));
}

#[test]
fn a_large_body_has_the_digest_of_its_whole_text() {
    let numbers: Vec<u32> = (0..50_000).collect();
    let text = serde_json::to_string(&numbers).expect("JSON");
    assert_eq!(of(&numbers).as_bytes()[1..], digest_of(&text));
    assert_eq!(of(&json!({"n": numbers})).as_bytes()[1..], digest_of(&format!("{{\"n\":{text}}}")));
}

/// A slow and obvious reference implementation: it sorts and prints.
fn reference(value: &Value) -> String {
    match value {
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(name, _)| {
                let name = reference_string(name);
                name[1..name.len() - 1].to_owned()
            });
            let members: Vec<_> = members
                .into_iter()
                .map(|(name, value)| format!("{}:{}", reference_string(name), reference(value)))
                .collect();
            format!("{{{}}}", members.join(","))
        }
        Value::Array(elements) => format!("[{}]", elements.iter().map(reference).collect::<Vec<_>>().join(",")),
        Value::String(text) => reference_string(text),
        Value::Number(number) => reference_number(&number.to_string()),
        other => other.to_string(),
    }
}

/// The reference for numbers, *0.digits × 10^point*, digit by digit: it removes all zeros at either end of the digits,
/// and puts the decimal point where it belongs unless it is more than 40 places away.
fn reference_number(text: &str) -> String {
    let text = text.to_ascii_lowercase();
    let (sign, text) = text.strip_prefix('-').map_or(("", &*text), |rest| ("-", rest));
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let mut point = exponent.parse::<i64>().expect("an exponent") + i64::try_from(whole.len()).expect("short");
    let mut digits = format!("{whole}{fraction}");
    while digits.starts_with('0') {
        digits.remove(0);
        point -= 1;
    }
    while digits.ends_with('0') {
        digits.pop();
    }
    if digits.is_empty() {
        return "0".to_owned();
    }
    let length = i64::try_from(digits.len()).expect("short");
    if !(-40..=40).contains(&point) {
        return format!("{sign}{digits}e{}", point - length);
    }
    let zeros = |count: i64| "0".repeat(usize::try_from(count).unwrap_or_default());
    let digits = format!("{}{digits}{}", zeros(1 - point), zeros(point - length));
    let (whole, fraction) = digits.split_at(usize::try_from(point.max(1)).expect("positive"));
    let separator = if fraction.is_empty() { "" } else { "." };
    format!("{sign}{whole}{separator}{fraction}")
}

fn digest_of(canonical: &str) -> Vec<u8> {
    use sha2::Digest as _;
    sha2::Sha256::digest(format!("j{canonical}")).to_vec()
}

/// Whether serde_json keeps every digit of a number: its feature `arbitrary_precision`, which another crate may turn
/// on.
fn digits_are_kept() -> bool {
    serde_json::from_str::<serde_json::Number>("1e400").is_ok()
}

/// A decimal number in JSON, of any length and size. If an `f64` must hold it, its digits and its exponent are limited.
fn any_decimal() -> impl proptest::strategy::Strategy<Value = String> {
    use proptest::prelude::*;
    let (digits, power) = if digits_are_kept() { (1..=60_usize, -500..500_i32) } else { (1..=15, -250..250) };
    let digits = prop_oneof![
        prop::collection::vec(0..10_u8, digits.clone()),
        // Zeros at both ends, which carry no value.
        (prop::collection::vec(0..10_u8, 1..=4_usize), 0..5_usize, 0..6_usize).prop_map(|(digits, before, after)| {
            let zeros = |count| std::iter::repeat_n(0, count);
            zeros(before).chain(digits).chain(zeros(after)).collect()
        }),
    ];
    (any::<bool>(), digits, any::<prop::sample::Index>(), prop::option::of(power), 0..4_usize).prop_map(
        |(negative, digits, point, exponent, spelling)| {
            let digits: String = digits.into_iter().map(|digit| char::from(b'0' + digit)).collect();
            let (whole, fraction) = digits.split_at(point.index(digits.len() + 1));
            let whole = whole.trim_start_matches('0');
            let mut text = format!("{}{}", if negative { "-" } else { "" }, if whole.is_empty() { "0" } else { whole });
            if !fraction.is_empty() {
                text = format!("{text}.{fraction}");
            }
            match exponent {
                Some(exponent) if spelling == 0 => format!("{text}E{exponent:+04}"),
                Some(exponent) if spelling == 1 => format!("{text}e{exponent:+}"),
                Some(exponent) => format!("{text}e{exponent}"),
                None => text,
            }
        },
    )
}

/// Any float, and often a decimal of a few digits, as amounts are.
fn any_float() -> impl proptest::strategy::Strategy<Value = f64> {
    use proptest::num::f64::{NEGATIVE, NORMAL, POSITIVE, SUBNORMAL, ZERO};
    use proptest::prelude::*;
    let decimal = |(digits, size, decimals): (i64, u32, i32)| (digits >> size) as f64 / 10_f64.powi(decimals);
    prop_oneof![
        POSITIVE | NEGATIVE | NORMAL | SUBNORMAL | ZERO,
        (any::<i64>(), 0..63_u32, 0..8_i32).prop_map(decimal),
        // Whole numbers, halves, quarters and so on, of about as many digits as an `f64` holds.
        (any::<i64>(), 8..20_u32, 0..8_i32)
            .prop_map(|(digits, size, halves)| (digits >> size) as f64 / 2_f64.powi(halves)),
    ]
}

/// A value whose members come in the opposite order.
struct Backwards<'v>(&'v Value);

impl Serialize for Backwards<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Object(members) => {
                let members: Vec<_> = members.iter().collect();
                serializer.collect_map(members.into_iter().rev().map(|(name, value)| (name, Backwards(value))))
            }
            Value::Array(elements) => serializer.collect_seq(elements.iter().map(Backwards)),
            other => other.serialize(serializer),
        }
    }
}

/// The escapes of serde_json.
fn reference_string(text: &str) -> String {
    let escaped: String = text
        .chars()
        .map(|character| match character {
            '"' | '\\' => format!("\\{character}"),
            '\u{8}' => "\\b".to_owned(),
            '\u{c}' => "\\f".to_owned(),
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\0'..='\u{1f}' => format!("\\u{:04x}", u32::from(character)),
            _ => character.to_string(),
        })
        .collect();
    format!("\"{escaped}\"")
}

fn any_json() -> impl proptest::strategy::Strategy<Value = Value> {
    use proptest::prelude::*;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any_decimal().prop_map(|text| parsed(&text)),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
            prop::collection::vec((any::<String>(), inner), 0..8)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest::proptest! {
    #[test]
    fn any_json_has_the_fingerprint_of_the_reference(value in any_json()) {
        let expected = digest_of(&reference(&value));
        let fingerprint = of(&value);
        proptest::prop_assert_eq!(&fingerprint.as_bytes()[1..], expected.as_slice());
    }

    /// Every significant digit counts, and no other digit does; with `arbitrary_precision`, for numbers of any length.
    #[test]
    fn any_decimal_is_its_exact_value(text in any_decimal()) {
        let canonical = reference_number(&text);
        let fingerprint = of(&parsed(&text));
        proptest::prop_assert_eq!(&fingerprint.as_bytes()[1..], digest_of(&canonical), "{} is {}", text, canonical);
    }

    /// All integer types, and their text if serde_json can represent it.
    #[test]
    fn any_integer_is_its_digits(number: i128, positive: u128, shift in 0..128_u32) {
        let (number, positive) = (number >> shift, positive >> shift);
        let (one, other) = (of(&number), of(&positive));
        proptest::prop_assert_eq!(&one.as_bytes()[1..], digest_of(&number.to_string()));
        proptest::prop_assert_eq!(&other.as_bytes()[1..], digest_of(&positive.to_string()));
        proptest::prop_assert_ne!(of(&number.wrapping_add(1)), one);
        if digits_are_kept() || i64::try_from(number).is_ok() || u64::try_from(number).is_ok() {
            proptest::prop_assert_eq!(of(&parsed(&number.to_string())), one);
        }
        if digits_are_kept() || number.unsigned_abs() <= 1 << 53 {
            proptest::prop_assert_eq!(of(&parsed(&format!("{number}.00"))), one);
        }
        if digits_are_kept() || u64::try_from(positive).is_ok() {
            proptest::prop_assert_eq!(of(&parsed(&positive.to_string())), other);
        }
    }

    /// The order of members makes no difference, at any depth.
    #[test]
    fn members_in_any_order_are_one_request(value in any_json()) {
        let fingerprint = of(&Backwards(&value));
        proptest::prop_assert_eq!(&fingerprint.as_bytes()[1..], digest_of(&reference(&value)));
    }

    /// A float, its shortest text parsed again, and its value in a struct are one number; two floats are two.
    #[test]
    fn any_two_floats_are_told_apart(one in any_float(), other in any_float()) {
        let text = serde_json::to_string(&one).expect("a number");
        let fingerprint = of(&one);
        proptest::prop_assert_eq!(&fingerprint.as_bytes()[1..], digest_of(&reference_number(&text)), "{}", text);
        proptest::prop_assert_eq!(fingerprint, of(&parsed(&text)));
        proptest::prop_assert_eq!(of(&one) == of(&other), one == other);
    }
}
