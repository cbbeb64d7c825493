//! The header `Idempotency-Key`: equal keys, malformed keys.

use http::{HeaderMap, HeaderValue};
use proptest::prelude::*;

use super::{MalformedKey, key_value};
use crate::InvalidKey;
use crate::key::{MAX_PART_BYTES, checked};

fn read(line: &[u8]) -> Result<Option<String>, MalformedKey> {
    let mut headers = HeaderMap::new();
    headers.append("idempotency-key", HeaderValue::from_bytes(line).expect("a header's value"));
    key_value(&headers, checked)
}

#[test]
fn a_quoted_string_and_a_bare_word_are_the_same_key() {
    for line in [&b"abc-123"[..], b"\"abc-123\"", b"  \"abc-123\" ", b" abc-123\t"] {
        assert_eq!(read(line), Ok(Some("abc-123".to_owned())), "{line:?}");
    }
    assert_eq!(read(br#""a \"b\" \\ c""#), Ok(Some(r#"a "b" \ c"#.to_owned())));
}

#[test]
fn a_malformed_key_names_its_mistake() {
    let too_long = "x".repeat(MAX_PART_BYTES + 1);
    for (line, why) in [
        (&b"\"a\"; v=1"[..], "Parameters"),
        (b"a;v=1", "Parameters"),
        (b"a, b", "Several"),
        (b"\"a\", \"b\"", "Several"),
        (b"\"a", "Neither"),
        (b"a\"", "Neither"),
        (b"a b", "Neither"),
        (b"\"a\" b", "Neither"),
        (br#""a\b""#, "Neither"),
        (b"\"caf\xc3\xa9\"", "Neither"),
        (b"caf\xc3\xa9", "Neither"),
        (b"\"a\tb\"", "Neither"),
        (b"", "Invalid(Empty"),
        (b"\"\"", "Invalid(Empty"),
        (b"\" \"", "Invalid(NothingVisible"),
        (too_long.as_bytes(), "Invalid(TooLong"),
        (format!("\"{too_long}\"").as_bytes(), "Invalid(TooLong"),
    ] {
        let error = read(line).expect_err("no key");
        assert!(format!("{error:?}").starts_with(why), "{line:?}: {error:?}");
    }
    assert!(matches!(read(b""), Err(MalformedKey::Invalid(InvalidKey::Empty { .. }))));
    assert_eq!(read("x".repeat(MAX_PART_BYTES).as_bytes()).map(|key| key.map(|key| key.len())), Ok(Some(255)));
}

#[test]
fn several_header_lines_are_refused_even_if_they_are_equal() {
    let mut headers = HeaderMap::new();
    headers.append("idempotency-key", HeaderValue::from_static("a"));
    headers.append("idempotency-key", HeaderValue::from_static("a"));
    assert_eq!(key_value(&headers, checked), Err(MalformedKey::Several));
    assert_eq!(key_value(&HeaderMap::new(), checked), Ok(None));
}

/// What a quoted string or a word may be, without the anchors.
fn of_the_description() -> impl Strategy<Value = String> {
    let description = include_str!("../../../docs/openapi.yaml");
    let pattern = description.lines().find_map(|line| line.trim().strip_prefix("schema: { type: string, pattern: '^"));
    let pattern = pattern.and_then(|rest| rest.strip_suffix("$' }")).expect("the pattern of the key");
    proptest::string::string_regex(pattern).expect("a pattern")
}

proptest! {
    #[test]
    fn the_layer_accepts_each_key_that_the_description_for_tools_accepts(line in of_the_description()) {
        prop_assert!(matches!(read(line.as_bytes()), Ok(Some(_))), "{line}");
    }

    /// For everything that begins with a quote, an independent parser of structured fields is the reference.
    #[test]
    fn a_quoted_string_agrees_with_another_parser(line in "\"[ -~]{0,20}\"?[ ;=a-z]{0,4}") {
        let Ok(value) = HeaderValue::from_str(&line) else { return Ok(()) };
        let theirs = match sfv::Parser::new(line.trim()).parse::<sfv::Item>() {
            Ok(sfv::Item { bare_item: sfv::BareItem::String(text), params }) if params.is_empty() => Some(String::from(text)),
            _ => None,
        };
        let ours = read(value.as_bytes()).ok().flatten();
        prop_assert_eq!(ours, theirs.filter(|text| !text.trim().is_empty()));
    }

    /// Any bytes that HTTP allows are a key that PostgreSQL accepts, or an error. Quoting a bare word changes nothing.
    #[test]
    fn any_value_is_a_key_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        let Ok(value) = HeaderValue::from_bytes(&line) else { return Ok(()) };
        if let Ok(Some(key)) = read(value.as_bytes()) {
            prop_assert!((1..=MAX_PART_BYTES).contains(&key.len()));
            prop_assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(read(quoted.as_bytes()), Ok(Some(key)));
        }
    }
}
