//! The vectors of the fingerprint of bytes, computed with the standard library of each language. The Rust library and
//! `idempotency.fingerprint` are tested by the same file.

use std::io::{ErrorKind, Write as _};
use std::process::Command;

use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/fingerprints.json");

/// The program prints the fingerprint of each request in the file, one in a line.
fn computes_the_vectors(interpreter: &str, flag: &str, program: &str) -> anyhow::Result<()> {
    let output = match Command::new(interpreter).args([flag, program, VECTORS]).output() {
        Ok(output) => output,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // libtest hides what a passing test prints.
            return Ok(writeln!(std::io::stderr(), "skipped: there is no {interpreter}")?);
        }
        Err(error) => return Err(error.into()),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let vectors: Vec<Value> = serde_json::from_str(&std::fs::read_to_string(VECTORS)?)?;
    let expected: Vec<_> = vectors.iter().filter_map(|vector| vector["fingerprint"].as_str()).collect();
    assert_eq!(String::from_utf8(output.stdout)?.lines().collect::<Vec<_>>(), expected);
    assert!(expected.len() > 5 && expected.len() == vectors.len(), "{vectors:?}");
    Ok(())
}

#[test]
fn python_computes_every_vector() -> anyhow::Result<()> {
    let program = "
import hashlib, json, sys
for vector in json.load(open(sys.argv[1])):
    print('03' + hashlib.sha256(bytes.fromhex(vector['request'])).hexdigest())";
    computes_the_vectors("python3", "-c", program)
}

#[test]
fn node_computes_every_vector() -> anyhow::Result<()> {
    let program = "
for (const { request } of JSON.parse(require('node:fs').readFileSync(process.argv[1])))
    console.log('03' + require('node:crypto').createHash('sha256').update(request, 'hex').digest('hex'))";
    computes_the_vectors("node", "-e", program)
}
