//! `script/chaos [--seconds N] [--operations N] [--seed S] [--only NAME,…] [--patroni] [--citus] [--mutant NAME]
//! [--mutants] [--list]`

use anyhow::{Context as _, bail};

use crate::scenario;
use crate::subject::Subject;
use crate::trials;

pub(crate) struct Arguments {
    /// For all scenarios together, without what it takes to start and to settle.
    pub(crate) seconds: u64,
    /// For all scenarios together: each runs until it has made its share of them, however slow it is.
    pub(crate) operations: u64,
    pub(crate) seed: u64,
    pub(crate) only: Vec<String>,
    /// The scenarios under Patroni, instead of all others.
    pub(crate) patroni: bool,
    /// The scenarios on Citus, instead of all others.
    pub(crate) citus: bool,
    pub(crate) subject: Subject,
    /// Each mutant with its scenario, instead of the crate with all.
    pub(crate) mutants: bool,
    pub(crate) list: bool,
}

impl Arguments {
    pub(crate) fn parse(mut words: impl Iterator<Item = String>) -> anyhow::Result<Self> {
        let mut arguments = Self {
            seconds: 60,
            operations: 0,
            seed: crate::history::now() % 1_000_000,
            only: Vec::new(),
            patroni: false,
            citus: false,
            subject: Subject::Crate,
            mutants: false,
            list: false,
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match word.as_str() {
                "--seconds" => arguments.seconds = value()?.parse().context("--seconds is a number")?,
                "--operations" => arguments.operations = value()?.parse().context("--operations is a number")?,
                "--seed" => arguments.seed = value()?.parse().context("--seed is a number")?,
                "--only" => arguments.only.extend(value()?.split(',').map(str::to_owned)),
                "--mutant" => arguments.subject = value()?.parse()?,
                "--patroni" => arguments.patroni = true,
                "--citus" => arguments.citus = true,
                "--mutants" => arguments.mutants = true,
                "--list" => arguments.list = true,
                _ => bail!(
                    "usage: script/chaos [--seconds N] [--operations N] [--seed S] [--only NAME,…] [--patroni] [--citus] \
                     [--mutant NAME] [--mutants] [--list]"
                ),
            }
        }
        for name in &arguments.only {
            if !known().any(|(known, _)| known == *name) {
                bail!("there is no scenario {name:?}; --list shows them");
            }
        }
        Ok(arguments)
    }

    /// The scenarios to play, and how much of the time each gets.
    pub(crate) fn scenarios(&self) -> Vec<(&'static str, u32)> {
        if !self.only.is_empty() {
            return known().filter(|(name, _)| self.only.iter().any(|only| only == name)).collect();
        }
        match (self.patroni, self.citus) {
            (false, false) => scenario::ALL.to_vec(),
            (true, false) => scenario::PATRONI.to_vec(),
            (false, true) => scenario::CITUS.to_vec(),
            (true, true) => [scenario::PATRONI, scenario::CITUS].concat(),
        }
    }
}

fn known() -> impl Iterator<Item = (&'static str, u32)> {
    [scenario::ALL, scenario::PATRONI, scenario::CITUS].into_iter().flatten().copied()
}

pub(crate) fn list() {
    println!("scenarios:");
    scenario::ALL.iter().for_each(|(name, _)| println!("  {name}"));
    println!("scenarios of --patroni:");
    scenario::PATRONI.iter().for_each(|(name, _)| println!("  {name}"));
    println!("scenarios of --citus:");
    scenario::CITUS.iter().for_each(|(name, _)| println!("  {name}"));
    println!("mutants, and what has to catch each:");
    trials::TRIALS.iter().for_each(|trial| println!("  {:<34} {}", trial.mutant.name(), trial.scenario));
}
