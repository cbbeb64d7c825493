//! The functions that the crate creates. Its migrations contain those of each earlier release, too.

use std::sync::LazyLock;

use sha2::{Digest as _, Sha256};

use super::MIGRATIONS;

/// A digest of the name, the language, the settings and the body of each function, as `record::schema` computes it of the
/// functions in the database. Another file that creates functions belongs here, too: a test compares all of them.
pub(super) static FUNCTIONS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let texts = MIGRATIONS.iter().map(|migration| migration.sql.as_str());
    let functions = texts.flat_map(|text| text.split("\ncreate function idempotency.").skip(1));
    functions.map(|function| digest(function).expect("a name, a language and a body")).collect()
});

/// Of a text that begins with the name of the function.
fn digest(function: &str) -> Option<String> {
    let (head, quoted) = function.split_once(" as ")?;
    let (name, _) = head.split_once('(')?;
    let language = head.split_once("language ")?.1.split_whitespace().next()?;
    let definer = head.contains("security definer");
    let settings =
        head.split_once(" set search_path = ").map_or(String::new(), |(_, path)| format!("search_path={path}"));
    let quote = if quoted.starts_with("$$") { "$$" } else { "'" };
    let (body, _) = quoted.strip_prefix(quote)?.split_once(quote)?;
    let digest = Sha256::digest(format!("{name}\n{language}\n{definer}\n{settings}\n{}", body.replace('\r', "")));
    Some(hex::encode(digest))
}
