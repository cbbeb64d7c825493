//! JSON bodies: all spellings of one value are one request, two values are two requests, and no bytes
//! panic.
//!
//! `PROPTEST_CASES` is the number of cases.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

fn hash(text: impl AsRef<[u8]>) -> Option<Fingerprint> {
    Fingerprint::of_json_without(text.as_ref(), []).ok()
}

/// `script/prove` runs this with serde_json's `arbitrary_precision` too, because another crate may turn it on. A
/// fingerprint that was stored before must still be the same.
#[test]
fn the_digest_is_the_same_however_serde_json_was_built() {
    let canonical = r#"{"$serde_json::private::Number":-3,"amount":12.5,"n":[0,{"a":1}]}"#;
    let text = r#"{"n": [0, {"a": 1.0}], "amount": 12.50, "$serde_json::private::Number": -3}"#;
    assert_eq!(hash(text), Some(Fingerprint::of_content(b"j", canonical.as_bytes())));
    assert_eq!(hash("12.50"), Fingerprint::of_json(&serde_json::json!(12.5)).ok());
}

#[test]
fn a_text_that_is_not_json_is_refused_even_if_the_fault_would_be_cut_out() {
    let pointer = Pointer::parse("/a").expect("a pointer");
    for text in ["", "{", "{}{}", "[1,]", "nul", r#"{"a":nul}"#, r#"{"a":1,}"#, r#"{"a":"\x"}"#, "[1 2]"] {
        assert_eq!(hash(text), None, "{text}");
        assert!(Fingerprint::of_json_without(text.as_bytes(), [&pointer]).is_err(), "{text}");
    }
    assert_eq!(hash(b"\"\xff\""), None, "not UTF-8");
}

/// Two texts without a canonical form are one request only if their bytes are the same.
#[test]
fn a_text_without_a_canonical_form_is_compared_by_its_bytes() {
    let deep = format!("{}{}", "[".repeat(1_000), "]".repeat(1_000));
    for (text, other) in [
        (r#"{"a":1,"a":2}"#, r#"{"a":1, "a":2}"#),
        (r#"{"a":1,"a":2}"#, r#"{"a":2,"a":1}"#),
        (r#""\ud800""#, r#""\ud801""#),
        (&deep, &format!(" {deep}")),
    ] {
        assert_eq!(hash(text), Some(Fingerprint::of_content(b"t", text.as_bytes())));
        assert_ne!(hash(text), hash(other));
        assert_ne!(hash(text), Some(Fingerprint::of_bytes(text.as_bytes())), "kinds do not mix");
    }
    // A part that should be ignored is compared too.
    let sent_at = Pointer::parse("/sent_at").expect("a pointer");
    let without = |text: &str| Fingerprint::of_json_without(text.as_bytes(), [&sent_at]).expect("it is JSON");
    assert_eq!(without(r#"{"a":"x","sent_at":1}"#), without(r#"{"a":"x","sent_at":2}"#));
    assert_ne!(without(r#"{"a":"\ud800","sent_at":1}"#), without(r#"{"a":"\ud800","sent_at":2}"#));
}

/// A JSON value. A number is digits × 10^exponent without leading and trailing zeros, so that `==` compares by value.
#[derive(Clone, Debug, PartialEq)]
enum Json {
    Null,
    Bool(bool),
    Number { negative: bool, digits: String, exponent: i32 },
    Text(String),
    Array(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

fn number(negative: bool, digits: u64, exponent: i32) -> Json {
    if digits == 0 {
        return Json::Number { negative: false, digits: "0".to_owned(), exponent: 0 };
    }
    let digits = digits.to_string();
    let kept = digits.trim_end_matches('0');
    let dropped = i32::try_from(digits.len() - kept.len()).expect("a few digits");
    Json::Number { negative, digits: kept.to_owned(), exponent: exponent + dropped }
}

/// Numbers of at most this many digits, in any spelling.
fn any_number(most: u32) -> impl Strategy<Value = Json> {
    let digits = prop_oneof![0..20_u64, 0..10_u64.pow(most.min(19))];
    (any::<bool>(), digits, -8..9_i32).prop_map(|(negative, digits, exponent)| number(negative, digits, exponent))
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![any::<String>(), "[a-c\"\\\\/\u{0}-\u{1f}é\u{1f980}]{0,4}"]
}

fn any_json(most_digits: u32) -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        1 => Just(Json::Null),
        1 => any::<bool>().prop_map(Json::Bool),
        4 => any_number(most_digits),
        2 => any_text().prop_map(Json::Text),
    ];
    leaf.prop_recursive(3, 24, 5, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Json::Array),
            prop::collection::btree_map(any_text(), inner, 0..5).prop_map(Json::Object),
        ]
    })
}

/// Chooses among the spellings of a value, by an endless stream of numbers.
struct Choice(u64);

impl Choice {
    fn of(&mut self, choices: u64) -> u64 {
        // Knuth's MMIX generator; the high bits are the random ones.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % choices
    }

    fn space(&mut self, out: &mut String) {
        for _ in 0..self.of(3) {
            out.push([' ', '\n', '\r', '\t'][self.of(4) as usize]);
        }
    }
}

/// Spells the value in one of its many ways.
fn spell(json: &Json, choice: &mut Choice, out: &mut String) {
    choice.space(out);
    match json {
        Json::Null => out.push_str("null"),
        Json::Bool(value) => out.push_str(&value.to_string()),
        Json::Number { negative, digits, exponent } => {
            out.push_str(&spell_number(*negative, digits, *exponent, choice))
        }
        Json::Text(text) => spell_text(text, choice, out),
        Json::Array(elements) => {
            out.push('[');
            for (at, element) in elements.iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                spell(element, choice, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            out.push('{');
            let mut members: Vec<_> = members.iter().collect();
            for at in (1..members.len()).rev() {
                members.swap(at, choice.of(at as u64 + 1) as usize);
            }
            for (at, (name, value)) in members.into_iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                choice.space(out);
                spell_text(name, choice, out);
                choice.space(out);
                out.push(':');
                spell(value, choice, out);
            }
            out.push('}');
        }
    }
    choice.space(out);
}

/// Puts the point anywhere within the digits, adds a zero behind them, and chooses the exponent that keeps the value.
fn spell_number(negative: bool, digits: &str, exponent: i32, choice: &mut Choice) -> String {
    let sign = if negative { "-" } else { "" };
    if digits == "0" {
        return ["0", "-0", "0.0", "0e3", "-0.00E-7"][choice.of(5) as usize].to_owned();
    }
    if exponent == 0 && choice.of(2) == 0 {
        return format!("{sign}{digits}");
    }
    let (mut mantissa, mut exponent) = (digits.to_owned(), exponent);
    if choice.of(2) == 0 {
        mantissa.push('0');
        exponent -= 1;
    }
    let point = 1 + choice.of(mantissa.len() as u64) as usize;
    let mut text = format!("{sign}{}", &mantissa[..point]);
    if point < mantissa.len() {
        text.push('.');
        text.push_str(&mantissa[point..]);
        exponent += i32::try_from(mantissa.len() - point).expect("a few digits");
    }
    let e = ["e", "E"][choice.of(2) as usize];
    let plus = if exponent >= 0 { ["", "+", "00"][choice.of(3) as usize] } else { "" };
    if exponent != 0 || choice.of(2) == 0 {
        text.push_str(&format!("{e}{plus}{exponent}"));
    }
    text
}

fn spell_text(text: &str, choice: &mut Choice, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        let short = match character {
            '"' => Some("\\\""),
            '\\' => Some("\\\\"),
            '/' => Some("\\/"),
            '\n' => Some("\\n"),
            '\u{8}' => Some("\\b"),
            _ => None,
        };
        match (choice.of(3), short) {
            (0, Some(short)) => out.push_str(short),
            (0 | 1, None) if character >= ' ' && !matches!(character, '"' | '\\') => out.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push('"');
}

fn spelled(json: &Json, seed: u64) -> String {
    let mut text = String::new();
    spell(json, &mut Choice(seed), &mut text);
    text
}

proptest! {
    #[test]
    fn all_spellings_of_a_value_are_one_request(json in any_json(19), one: u64, other: u64) {
        let (one, other) = (spelled(&json, one), spelled(&json, other));
        let fingerprint = hash(&one);
        prop_assert!(fingerprint.is_some(), "{} is JSON", one);
        prop_assert_eq!(fingerprint, hash(&other), "{} {}", one, other);
    }

    #[test]
    fn two_values_are_two_requests(one in any_json(19), other in any_json(19), seeds: (u64, u64)) {
        prop_assume!(one != other);
        let (one, other) = (spelled(&one, seeds.0), spelled(&other, seeds.1));
        let fingerprint = hash(&one);
        prop_assert!(fingerprint.is_some(), "{} is JSON", one);
        prop_assert_ne!(fingerprint, hash(&other), "{} {}", one, other);
    }

    /// The nearest neighbours: one unit in the last place, one power of ten, the sign.
    #[test]
    fn numbers_that_are_next_to_each_other_are_two_requests(
        digits in prop_oneof![1..1_000_u64, 1..10_u64.pow(16), 10_u64.pow(15)..10_u64.pow(19)],
        exponent in -20..20_i32,
        seeds: (u64, u64),
    ) {
        let one = number(false, digits, exponent);
        let neighbours = [
            number(false, digits + 1, exponent),
            number(false, digits, exponent + 1),
            number(true, digits, exponent),
        ];
        for other in neighbours {
            let (one, other) = (spelled(&one, seeds.0), spelled(&other, seeds.1));
            prop_assert_ne!(hash(&one), hash(&other), "{} {}", one, other);
        }
    }

    #[test]
    fn no_bytes_panic(
        bytes in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..64),
            "[\\[\\]{}\",:0-9.eE+\\-\\\\u tfn]{0,64}".prop_map(String::into_bytes),
            (0..2000_usize, any_json(19), any::<u64>())
                .prop_map(|(depth, json, seed)| format!("{}{}", "[".repeat(depth), spelled(&json, seed)).into_bytes()),
        ],
        cut in 0..64_usize,
    ) {
        let json = serde_json::from_slice::<serde_json::Value>(&bytes).is_ok();
        prop_assert!(!json || hash(&bytes).is_some(), "{:?}", String::from_utf8_lossy(&bytes));
        let _ = hash(&bytes[..bytes.len().min(cut)]);
    }
}
