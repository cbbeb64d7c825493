//! What happened, line by line, against what should have.

use std::fmt::Display;
use std::process::ExitCode;

#[derive(Default)]
pub(crate) struct Story {
    scenes: usize,
    right: usize,
    wrong: usize,
}

impl Story {
    pub(crate) fn scene(&mut self, title: &str) {
        self.scenes += 1;
        println!("\n{}. {title}", self.scenes);
    }

    /// One line of the story: what was asked or counted, and what came of it.
    pub(crate) fn check(&mut self, what: &str, came: impl Display, expected: impl Display) {
        let (came, expected) = (came.to_string(), expected.to_string());
        if came == expected {
            self.right += 1;
            println!("   PASS  {what}: {came}");
        } else {
            self.wrong += 1;
            println!("   FAIL  {what}: {came}, expected {expected}");
        }
    }

    pub(crate) fn end(&self) -> ExitCode {
        let Self { scenes, right, wrong } = self;
        println!("\n{scenes} scenes: {right} passed, {wrong} failed");
        // A story without a line proves nothing.
        if *wrong == 0 && *right > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
