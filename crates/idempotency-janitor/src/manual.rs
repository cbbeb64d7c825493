//! `completions` and `manual`: what a package installs beside the program. Both are generated from the definition of
//! the command line.

use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::{Shell, generate};

use crate::arguments::Arguments;
use crate::failure::Failure;
use crate::process::{Ending, print};

pub(crate) fn completions(shell: Shell) -> Result<Ending, Failure> {
    let mut script = Vec::new();
    generate(shell, &mut Arguments::command(), "idempotency-janitor", &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// One page for the program, and one for each command: `idempotency-janitor-sweep.1`.
pub(crate) fn pages(directory: &Path) -> Result<Ending, Failure> {
    let written = clap_mangen::generate_to(Arguments::command(), directory);
    written.map_err(|error| Failure::Manual { directory: directory.to_owned(), error })?;
    Ok(Ending::Done)
}
