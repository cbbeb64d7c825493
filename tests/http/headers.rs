//! The header `Idempotency-Key`: valid keys, equal keys, malformed keys.

use axum::http::{HeaderMap, HeaderValue};
use pg_idempotency::http::{MalformedKey, key_value};
use pg_idempotency::{InvalidKey, MAX_PART_BYTES};
use proptest::prelude::*;
use sqlx::PgPool;

use crate::support::{app, create_effects, effects, post_to, request, send, transactional};

fn read(line: &[u8], strict: bool) -> Result<Option<String>, MalformedKey> {
    let mut headers = HeaderMap::new();
    headers.append("idempotency-key", HeaderValue::from_bytes(line).expect("a header's value"));
    key_value(&headers, strict)
}

#[test]
fn a_quoted_string_and_a_bare_word_are_the_same_key() {
    for line in [&b"abc-123"[..], b"\"abc-123\"", b"  \"abc-123\" ", b" abc-123\t"] {
        assert_eq!(read(line, false), Ok(Some("abc-123".to_owned())), "{line:?}");
    }
    assert_eq!(read(br#""a \"b\" \\ c""#, false), Ok(Some(r#"a "b" \ c"#.to_owned())));
}

#[test]
fn strict_accepts_only_a_quoted_string() {
    assert_eq!(read(b"\"abc\"", true), Ok(Some("abc".to_owned())));
    assert_eq!(read(b"abc", true), Err(MalformedKey::NotQuoted));
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
        (too_long.as_bytes(), "Invalid(TooLong"),
        (format!("\"{too_long}\"").as_bytes(), "Invalid(TooLong"),
    ] {
        let error = read(line, false).expect_err("no key");
        assert!(format!("{error:?}").starts_with(why), "{line:?}: {error:?}");
    }
    assert!(matches!(read(b"", false), Err(MalformedKey::Invalid(InvalidKey::Empty { .. }))));
    assert_eq!(read("x".repeat(MAX_PART_BYTES).as_bytes(), false).map(|key| key.map(|key| key.len())), Ok(Some(255)));
}

#[test]
fn several_header_lines_are_refused_even_if_they_are_equal() {
    let mut headers = HeaderMap::new();
    headers.append("idempotency-key", HeaderValue::from_static("a"));
    headers.append("idempotency-key", HeaderValue::from_static("a"));
    assert_eq!(key_value(&headers, false), Err(MalformedKey::Several));
    assert_eq!(key_value(&HeaderMap::new(), false), Ok(None));
}

proptest! {
    /// For everything in quotes, an independent parser of structured fields is the reference.
    #[test]
    fn strict_agrees_with_another_parser(line in "\"?[ -~]{0,20}\"?[ ;=a-z]{0,4}") {
        let Ok(value) = HeaderValue::from_str(&line) else { return Ok(()) };
        let theirs = match sfv::Parser::new(line.trim()).parse::<sfv::Item>() {
            Ok(sfv::Item { bare_item: sfv::BareItem::String(text), params }) if params.is_empty() => Some(String::from(text)),
            _ => None,
        };
        let ours = read(value.as_bytes(), true).ok().flatten();
        prop_assert_eq!(ours, theirs.filter(|text| !text.is_empty()));
    }

    /// Any bytes that HTTP allows are a key that PostgreSQL accepts, or an error. Quoting a bare word changes nothing.
    #[test]
    fn any_value_is_a_key_or_an_error(line in proptest::collection::vec(any::<u8>(), 0..300)) {
        let Ok(value) = HeaderValue::from_bytes(&line) else { return Ok(()) };
        if let Ok(Some(key)) = read(value.as_bytes(), false) {
            prop_assert!((1..=MAX_PART_BYTES).contains(&key.len()));
            prop_assert!(key.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
            let quoted = format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(read(quoted.as_bytes(), true), Ok(Some(key)));
        }
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_service_takes_both_forms_as_one_key(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    assert!(!post_to(&app, "/effects", "abc", "x").await.is_replayed());
    assert!(post_to(&app, "/effects", "\"abc\"", "x").await.is_replayed());
    assert_eq!(post_to(&app, "/effects", "a, b", "x").await.problem(), "malformed-key");
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_key_may_come_from_the_body_and_must_be_long_enough(pool: PgPool) {
    create_effects(&pool).await;
    let from_body = transactional(&pool).with_shortest_key(4).with_key_from(|_, body| {
        let order: Option<serde_json::Value> = serde_json::from_slice(body).ok();
        Ok(order.and_then(|order| Some(order["reference"].as_str()?.to_owned())))
    });
    let app = app(from_body);
    for replayed in [false, true] {
        let answer = send(&app, request("POST", "/effects", None, r#"{"reference":"r-17"}"#)).await;
        assert_eq!(answer.is_replayed(), replayed, "{answer:?}");
    }
    for (body, problem) in [
        (r#"{"reference":"r-1"}"#, "malformed-key"),
        (r#"{"reference":"line\nbreak"}"#, "malformed-key"),
        ("{}", "missing-key"),
    ] {
        assert_eq!(send(&app, request("POST", "/effects", None, body)).await.problem(), problem, "{body}");
    }
    assert_eq!(effects(&pool).await, 1);
}
