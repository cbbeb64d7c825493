//! Keys: which texts are valid, and that every valid text works.

use std::collections::HashSet;
use std::time::Duration;

use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{InvalidKey, Key, KeyPart};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use sqlx::PgPool;

use crate::support::{create_effects, effects, once};

#[test]
fn each_part_must_have_1_to_255_bytes() {
    for (part, make) in parts() {
        assert_eq!(make(""), Err(InvalidKey::Empty { part }));
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
fn a_part_that_nobody_can_see_is_refused_unless_it_is_of_a_record() {
    for (part, make) in parts() {
        for text in [" ", "   ", "\u{a0}", "\u{200b}", "\u{feff}", " \u{200b}\u{e0041}", "\u{3164}"] {
            assert_eq!(make(text), Err(InvalidKey::NothingVisible { part }), "{text:?}");
            assert!(make(&format!("{text}x{text}")).is_ok(), "{text:?}");
        }
    }
    assert!(Key::recorded(" ", " ", "\u{200b}").is_ok());
    assert_eq!(Key::recorded("s", "o", ""), Err(InvalidKey::Empty { part: KeyPart::Value }));
    assert!(Key::recorded("s", "o", "\n").is_err());
}

/// Every character alone is a value, through both doors or through none.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn rust_and_sql_refuse_the_same_invisible_values(pool: PgPool) -> anyhow::Result<()> {
    // Without a fingerprint, the refusal of the key comes first, and nothing is claimed.
    let refused = "
        create function pg_temp.refuses(value text) returns boolean language plpgsql as $$
        declare
            told text;
        begin
            perform idempotency.ensure('s', 'o', value, null);
            return null;
        exception when sqlstate 'IK008' then
            get stacked diagnostics told = pg_exception_hint;
            return told like 'scope, operation%';
        end $$";
    let mut conn = pool.acquire().await?;
    sqlx::raw_sql(refused).execute(&mut *conn).await?;
    let visible = |character: char| make_value(&character.to_string()).is_ok();
    let blocks = [(0x1, 0x3200), (0xfdf0, 0xffff), (0x1bc90, 0x1bcb0), (0x1d160, 0x1d190), (0xdfff0, 0xe1010)];
    for (first, last) in blocks {
        let sql =
            "select array_agg(code) from generate_series($1::int4, $2::int4) as code where pg_temp.refuses(chr(code))";
        let told: Option<Vec<i32>> = sqlx::query_scalar(sql).bind(first).bind(last).fetch_one(&mut *conn).await?;
        let told = told.unwrap_or_default();
        let codes = (first..=last).filter_map(|code| u32::try_from(code).ok().and_then(char::from_u32));
        let expected: Vec<_> = codes.filter(|code| !visible(*code)).map(|code| u32::from(code).cast_signed()).collect();
        assert_eq!(told, expected, "{first:#x} to {last:#x}");
    }
    let elsewhere = (0x3200..=0x0010_ffff_u32)
        .filter(|code| !blocks.iter().any(|(first, last)| (*first..=*last).contains(&code.cast_signed())));
    assert!(elsewhere.filter_map(char::from_u32).all(visible));
    // A key of several such characters, and one with something to see.
    for (value, is_refused) in
        [("\u{200b} \u{a0}", true), ("\u{200b} a", false), ("\u{e280}", false), (" \u{2080}", false)]
    {
        let refuses: bool = sqlx::query_scalar("select pg_temp.refuses($1)").bind(value).fetch_one(&mut *conn).await?;
        assert_eq!((refuses, make_value(value).is_err()), (is_refused, is_refused), "{value:?}");
    }
    Ok(())
}

#[test]
fn debug_prints_the_operation_alone() -> anyhow::Result<()> {
    let key = Key::new("tenant", "POST /orders", "5a1d93c2-8f6e-4a34-9f50-0f0b9f1c9a11")?;
    assert_eq!(format!("{key:?}"), r#"Key { operation: "POST /orders", .. }"#);
    Ok(())
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

/// Any text, and often one that SQL, arrays or collations might treat specially, or one of the greatest length.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        2 => any::<String>(),
        2 => "['\"\\\\{}(),$%:;?_ aAe\u{301}\u{e9}\u{ad}\u{200b}\u{202e}\u{fdd0}\u{feff}\u{ffff}\u{10ffff}]{1,8}",
        1 => "[\u{0}-\u{9f}]{0,3}",
        1 => "[a\u{e9}\u{1f980}]{60,260}",
        1 => "NULL|null|\\{\\}|\\\\x00|\\\\N",
    ]
}

/// Every statement takes a text that `Key::new` accepts unchanged: there is no SQL error, no two keys are equal, and
/// the record stores the same bytes. The message of each assertion contains the whole case, because there is no
/// shrinking here.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_text_is_refused_by_name_or_is_a_key_of_its_own(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut runner = TestRunner::default();
    let (mut performed, mut refused) = (HashSet::new(), 0);
    for _ in 0..400 {
        let parts = (any_text(), any_text(), any_text()).new_tree(&mut runner).expect("a case").current();
        let (scope, operation, value) = parts.clone();
        let key = Key::new(scope, operation, value);
        let valid = |text: &String| (1..=255).contains(&text.len()) && !text.chars().any(char::is_control);
        let seen =
            |text: &String| text.chars().any(|character| character.is_alphanumeric() || character.is_ascii_graphic());
        let parts_of = [&parts.0, &parts.1, &parts.2];
        match &key {
            Ok(_) => assert!(parts_of.into_iter().all(valid), "{parts:?}"),
            Err(InvalidKey::NothingVisible { .. }) => assert!(!parts_of.into_iter().all(seen), "{parts:?}"),
            Err(_) => assert!(!parts_of.into_iter().all(valid), "{parts:?}"),
        }
        let Ok(key) = key else {
            refused += 1;
            continue;
        };
        let seen = !performed.insert(parts.clone());
        for replayed in [seen, true] {
            let outcome = once(&pool, &key, "body").await;
            assert!(outcome.is_ok_and(|outcome| outcome.is_replayed() == replayed), "{parts:?}");
        }
    }
    assert!(refused > 20 && performed.len() > 100, "{refused} refused, {} performed", performed.len());
    assert_eq!(effects(&pool).await, i64::try_from(performed.len())?);
    let stored: Vec<(String, String, String)> =
        sqlx::query_as("select scope, operation, value from idempotency.record").fetch_all(&pool).await?;
    assert_eq!(stored.into_iter().collect::<HashSet<_>>(), performed);

    // The same keys as marks, whose statement takes them as arrays.
    let marks: HashSet<_> = performed.into_iter().map(|(scope, _, value)| (scope, "mark", value)).collect();
    let marks: Vec<_> = marks.into_iter().map(|(scope, operation, value)| Key::new(scope, operation, value)).collect();
    let marks = marks.into_iter().collect::<Result<Vec<_>, _>>()?;
    for expected in [Marked::First, Marked::Duplicate] {
        for batch in marks.chunks(100) {
            let mut tx = pool.begin().await?;
            let marked = MarkOptions::new(Duration::from_secs(60)).mark_many(&mut tx, batch).await?;
            tx.commit().await?;
            assert!(marked.iter().all(|marked| *marked == expected));
        }
    }
    Ok(())
}
