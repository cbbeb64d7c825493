//! A client in another language sends bytes and strings without a declared type, in the two forms of the guide's page.
//! The functions get the bytes that were sent.

use std::ffi::OsStr;
use std::process::Stdio;

use anyhow::ensure;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::database::Database;
use crate::installed::{directory, node_modules, python};
use crate::packages::WITH_FUNCTIONS;
use crate::program::text;
use crate::skipped;
use crate::vectors::{bytes, vectors};

/// Runs a program with each vector as bytes, and those that are a text as a string, too.
async fn stores_the_vectors(program: impl AsRef<OsStr>, file: &str, node_path: Option<&OsStr>) -> anyhow::Result<()> {
    let vectors = vectors()?;
    let mut sent = Vec::new();
    let mut expected = Vec::new();
    let mut strings = 0;
    for vector in &vectors {
        let hex = text(&vector["request"]);
        let is_text = String::from_utf8(bytes(&vector["request"])).is_ok_and(|text| !text.contains('\0'));
        strings += usize::from(is_text);
        for form in if is_text { &["bytes", "string"][..] } else { &["bytes"] } {
            let value = format!("{form} {}", expected.len());
            sent.push(json!({"value": value, "form": form, "hex": hex}));
            expected.push((value, text(&vector["fingerprint"])));
        }
    }
    assert!(strings > 5 && strings < vectors.len(), "{strings}");
    let database = Database::create(WITH_FUNCTIONS).await?;
    let mut command = Command::new(program);
    command.arg(file).arg(Value::from(sent).to_string()).env("DATABASE_URL", database.url());
    command.envs(node_path.map(|path| ("NODE_PATH", path))).env("PYTHONDONTWRITEBYTECODE", "1");
    let ended = command.stdin(Stdio::null()).kill_on_drop(true).output().await?;
    ensure!(ended.status.success(), "{file}: {}", String::from_utf8_lossy(&ended.stderr));
    for (value, fingerprint) in expected {
        let stored = database.fingerprint(&value).await?;
        assert_eq!(stored.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), fingerprint, "{value}");
    }
    database.drop().await
}

fn file(language: &str, name: &str) -> String {
    directory(language).join(name).display().to_string()
}

#[tokio::test]
async fn psycopg_stores_bytes_and_strings_as_they_were_sent() -> anyhow::Result<()> {
    let installed = python().as_ref().map_err(|reason| skipped::<()>("psycopg", reason));
    let Ok(python) = installed else { return Ok(()) };
    stores_the_vectors(python, &file("python", "as_sent.py"), None).await
}

#[tokio::test]
async fn pg_stores_bytes_and_strings_as_they_were_sent() -> anyhow::Result<()> {
    let installed = node_modules().as_ref().map_err(|reason| skipped::<()>("pg", reason));
    let Ok(packages) = installed else { return Ok(()) };
    stores_the_vectors("node", &file("node", "as_sent.js"), Some(packages.as_os_str())).await
}
