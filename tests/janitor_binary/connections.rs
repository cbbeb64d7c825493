//! What is said where there is no connection.

use crate::support::{assert_fails, janitor, text};

#[test]
fn errors_are_one_line_and_print_no_password() {
    assert_fails(&janitor(&["sweep"]), 2, "set DATABASE_URL");
    for (url, code) in [
        ("postgres://me:hunter2@127.0.0.1:1/db", 1),
        ("postgres://me:hunter2@127.0.0.1:nonsense/db", 2),
        ("hunter2", 2),
    ] {
        let output = janitor(&["sweep", "--database-url", url]);
        assert_fails(&output, code, "database URL");
        assert!(!text(&output.stderr).contains("hunter2"), "{}", text(&output.stderr));
    }
    assert_eq!(janitor(&["dance"]).status.code(), Some(2));
    assert_eq!(janitor(&[]).status.code(), Some(2));
    let help = janitor(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
}
