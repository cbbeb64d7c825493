//! What is said where there is no connection: one line, with the cause and what to do, and never a password.

use std::net::TcpListener;
use std::process::{Output, Stdio};

use crate::support::{Server, assert_fails, command, janitor, text};

const COMMANDS: [&[&str]; 8] = [
    &["sweep"],
    &["stats"],
    &["health"],
    &["unsettled"],
    &["migrate"],
    &["show", "scope", "operation", "value"],
    &["resolve", "scope", "operation", "value", "--response", "1", "--reason", "a test", "--seen", "nothing"],
    &["release", "scope", "operation", "value", "--reason", "a test", "--seen", "nothing"],
];

fn assert_says_no(output: &Output, code: i32, says: &str) {
    assert_fails(output, code, says);
    for said in [&output.stdout, &output.stderr] {
        assert!(!text(said).contains("hunter2"), "{}", text(said));
    }
}

#[test]
fn an_unusable_url_is_wrong_usage() {
    assert_fails(&janitor(&["sweep"]), 2, "set DATABASE_URL");
    for url in ["postgres://me:hunter2@127.0.0.1:nonsense/db", "hunter2"] {
        assert_says_no(&janitor(&["sweep", "--database-url", url]), 2, "should look like postgres://");
    }
    // sqlx takes any scheme, and what follows an unescaped # for a fragment.
    for url in [
        "jdbc:postgresql://me:hunter2@127.0.0.1/db",
        "mysql://me:hunter2@127.0.0.1/db",
        "://me:hunter2@127.0.0.1/db",
        "postgres:me:hunter2@127.0.0.1/db",
        "postgres://me:1#hunter2@127.0.0.1/db",
        "postgres://me:hunter2/@127.0.0.1/db",
    ] {
        let output = janitor(&["sweep", "--database-url", url]);
        assert_says_no(&output, 2, "percent-encode each special character of the password");
    }
    // These URLs are valid, and no server listens there.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    for start in ["POSTGRES://me:hunter2%23", "postgresql://me:%2Fhunter2"] {
        let url = format!("{start}@127.0.0.1:{port}/db");
        assert_says_no(&janitor(&["sweep", "--database-url", &url]), 1, "check the database URL");
    }
    assert_eq!(janitor(&["dance"]).status.code(), Some(2));
    assert_eq!(janitor(&[]).status.code(), Some(2));
    let help =
        command().arg("--help").env("DATABASE_URL", "postgres://me:hunter2@127.0.0.1/db").output().expect("runs");
    assert_eq!(help.status.code(), Some(0));
    assert!(!text(&help.stdout).contains("hunter2"), "{}", text(&help.stdout));
}

#[test]
fn no_server_is_said_in_one_line() {
    // The port is free again, so no server listens there.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let url = format!("postgres://me:hunter2@127.0.0.1:{port}/db");
    for arguments in COMMANDS {
        let output = command().args(arguments).env("DATABASE_URL", &url).output().expect("the binary runs");
        assert_says_no(&output, 1, "check the database URL, and that the server is up");
        assert!(text(&output.stderr).contains("refused"), "{}", text(&output.stderr));
    }
}

/// Supervisors decide by the exit code, also where the log is gone.
#[test]
fn the_exit_code_is_the_same_where_standard_error_cannot_be_written() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port();
    let url = format!("postgres://me@127.0.0.1:{port}/db");
    for (arguments, code) in
        [(&["show", "scope", "operation", "value", "--database-url", &url][..], 1), (&["sweep"], 2)]
    {
        let (nobody_reads, stderr) = std::io::pipe().expect("a pipe");
        drop(nobody_reads);
        let status = command().args(arguments).stdout(Stdio::null()).stderr(stderr).status().expect("the binary runs");
        assert_eq!(status.code(), Some(code), "{arguments:?}");
    }
}

#[test]
fn a_wrong_password_is_said_in_one_line() {
    let server = Server::start(Some("correct")).expect("a server");
    let with = |password: &str| server.url.replace("postgres@", &format!("postgres:{password}@"));
    for arguments in COMMANDS {
        let output = command().args(arguments).env("DATABASE_URL", with("hunter2")).output().expect("the binary runs");
        assert_says_no(&output, 1, "check the role, and its password");
        assert!(text(&output.stderr).contains("password authentication failed"), "{}", text(&output.stderr));
    }
    let output = janitor(&["migrate", "--database-url", &with("correct")]);
    assert_eq!(output.status.code(), Some(0), "the server asks for this one: {}", text(&output.stderr));
}
