//! What may be a key, and that whatever may be one works.

use pg_idempotency::{InvalidKey, Key, KeyPart, MAX_PART_BYTES};
use sqlx::PgPool;

use crate::support::{create_effects, effects, once};

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn every_valid_key_works_and_meets_no_other(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let longest = "x".repeat(MAX_PART_BYTES);
    let values = [
        "'; drop table idempotency.record; --",
        "\"quoted\"",
        "back\\slash",
        "$1",
        "%s",
        "🦀",
        // One letter in two normal forms: compared byte by byte, they are two keys.
        "\u{e9}",
        "e\u{301}",
        "e",
        "E",
        " ",
        "  ",
        "ß",
        "ss",
        &longest,
    ];
    for value in values {
        for replayed in [false, true] {
            let outcome = once(&pool, &Key::new(value, value, value)?, "body").await?;
            assert_eq!(outcome.is_replayed(), replayed, "{value:?}");
        }
    }
    assert_eq!(effects(&pool).await, i64::try_from(values.len())?);
    Ok(())
}

#[test]
fn each_part_must_have_1_to_255_bytes() {
    for (part, make) in parts() {
        assert_eq!(make(""), Err(InvalidKey::Empty { part }));
        assert_eq!(make("").map_err(|error| error.part()), Err(part));
        assert!(make(&"x".repeat(255)).is_ok());
        assert_eq!(make(&"x".repeat(256)), Err(InvalidKey::TooLong { part, bytes: 256 }));
        assert!(make(&"é".repeat(127)).is_ok(), "254 bytes");
        assert_eq!(
            make(&"é".repeat(128)),
            Err(InvalidKey::TooLong { part, bytes: 256 }),
            "128 characters are 256 bytes"
        );
    }
}

#[test]
fn control_characters_are_refused_and_named() {
    for (part, make) in parts() {
        for character in ['\0', '\n', '\r', '\t', '\u{1b}', '\u{7f}', '\u{9f}'] {
            let error = make(&format!("é{character}")).expect_err("a control character");
            assert_eq!(error, InvalidKey::ControlCharacter { part, character, at: 2 });
            assert!(error.to_string().contains(&part.to_string()), "{error}");
        }
    }
    assert!(make_value("a\0").expect_err("NUL").to_string().contains("U+0000"));
}

#[test]
fn debug_does_not_print_the_value_in_full() {
    for value in ["secret", "5a1d93c2-8f6e-4a34-9f50-0f0b9f1c9a11"] {
        let printed = format!("{:?}", make_value(value).expect("valid"));
        assert!(!printed.contains(value), "{printed}");
        assert!(printed.contains("bytes"), "{printed}");
    }
}

fn make_value(text: &str) -> Result<Key, InvalidKey> {
    Key::new("scope", "operation", text)
}

type Make = fn(&str) -> Result<Key, InvalidKey>;

fn parts() -> [(KeyPart, Make); 3] {
    [
        (KeyPart::Scope, |text| Key::new(text, "operation", "value")),
        (KeyPart::Operation, |text| Key::new("scope", text, "value")),
        (KeyPart::Value, make_value),
    ]
}

proptest::proptest! {
    /// No text panics, and what is accepted is what the rule says.
    #[test]
    fn any_text_is_accepted_or_refused_by_the_rule(text in ".{0,300}") {
        let valid = (1..=255).contains(&text.len()) && !text.chars().any(char::is_control);
        proptest::prop_assert_eq!(make_value(&text).is_ok(), valid);
    }
}
