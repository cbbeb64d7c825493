//! The books of a run: what was counted, against what was expected.

use std::fmt::Display;
use std::process::ExitCode;

#[derive(Default)]
pub struct Books {
    scene: String,
    scenes: usize,
    right: usize,
    wrong: Vec<String>,
    /// Why the run counts nothing.
    skipped: Option<&'static str>,
}

impl Books {
    pub fn scene(&mut self, title: &str) {
        self.scenes += 1;
        title.clone_into(&mut self.scene);
        println!("\n{}. {title}", self.scenes);
    }

    /// Prints a count or an answer, and compares it with the expected one.
    pub fn check(&mut self, what: &str, came: impl Display, expected: impl Display) {
        let (came, expected) = (came.to_string(), expected.to_string());
        if came == expected {
            self.right += 1;
            self.note(what, came);
        } else {
            self.mistake(&format!("{what}: {came}, expected {expected}"));
        }
    }

    /// Like [`check`](Self::check), for a number that varies from run to run. Below `least`, the run proves too little.
    pub fn check_at_least(&mut self, what: &str, counted: i64, least: i64) {
        if counted >= least {
            self.right += 1;
            self.note(what, counted);
        } else {
            self.mistake(&format!("{what}: {counted}, expected at least {least}"));
        }
    }

    /// Prints a number without an expectation.
    pub fn note(&self, what: &str, came: impl Display) {
        println!("   {what:<64} {came}");
    }

    /// The run needs something that this machine does not have. It counts nothing, and is not a failure.
    pub fn skip(&mut self, reason: &'static str) -> anyhow::Result<()> {
        self.skipped = Some(reason);
        Ok(())
    }

    fn mistake(&mut self, mistake: &str) {
        println!("   WRONG  {mistake}");
        self.wrong.push(format!("{}: {mistake}", self.scene));
    }

    pub(crate) fn verdict(&self) -> ExitCode {
        if let Some(reason) = self.skipped {
            println!("skipped: {reason}");
            return ExitCode::SUCCESS;
        }
        println!("\n{} counts in {} scenes", self.right + self.wrong.len(), self.scenes);
        self.wrong.iter().for_each(|wrong| println!("WRONG: {wrong}"));
        // A run without a count proves nothing.
        if self.wrong.is_empty() && self.right > 0 {
            println!("every count is right");
            return ExitCode::SUCCESS;
        }
        ExitCode::FAILURE
    }
}
