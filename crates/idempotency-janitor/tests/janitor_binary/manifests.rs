//! The manifests of `contrib/`: the binary accepts the arguments with which they start it.

use std::fs;

use crate::support::{janitor, text};

const KUBERNETES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/kubernetes");
const SYSTEMD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../contrib/systemd");

/// What follows `start` in the lines of the files of a folder.
fn lines(folder: &str, start: &str) -> Vec<String> {
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let texts = files.map(|path| fs::read_to_string(path).expect("a text"));
    let starting = |text: String| {
        text.lines().filter_map(|line| line.trim().strip_prefix(start)).map(str::to_owned).collect::<Vec<_>>()
    };
    texts.flat_map(starting).collect()
}

/// With `--help` at the end the binary reads all arguments before it, and does nothing.
fn assert_accepted(arguments: &[&str]) {
    let output = janitor(&[arguments, &["--help"]].concat());
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
}

#[test]
fn the_binary_accepts_the_arguments_of_each_manifest() {
    let lists = lines(KUBERNETES, "args: ");
    assert!(lists.len() >= 5, "{lists:?}");
    for list in lists {
        let arguments: Vec<String> = serde_json::from_str(&list).expect("a list of JSON");
        assert_accepted(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    }
    let commands = lines(SYSTEMD, "ExecStart=idempotency-janitor ");
    assert!(commands.len() >= 2, "{commands:?}");
    for command in commands {
        // An instance's name, and a variable of the environment, stand for one word.
        let command = command.replace("%i", "health");
        assert_accepted(&command.split_whitespace().collect::<Vec<_>>());
    }
}
