//! Python and Node packages, installed below `target/tmp` at their pinned versions, once for all tests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context as _, ensure};

/// What the tests know of one language: its interpreter with the packages, or the reason why there is none.
type Installed = Result<PathBuf, String>;

pub(crate) fn directory(language: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/services").join(language)
}

/// The interpreter of a virtual environment with the packages of python/requirements.txt.
pub(crate) fn python() -> &'static Installed {
    static PYTHON: OnceLock<Installed> = OnceLock::new();
    PYTHON.get_or_init(|| {
        if !runs(&["python3", "-c", "import sys, venv, ensurepip; assert sys.version_info >= (3, 10)"]) {
            return Err("there is no Python 3.10 with venv".into());
        }
        let venv = install("python", "requirements.txt", |into| {
            run(Command::new("python3").args(["-m", "venv"]).arg(into))?;
            let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--requirement"];
            let requirements = directory("python").join("requirements.txt");
            run(Command::new("timeout").arg("300").arg(into.join("bin/python")).args(pip).arg(requirements))
        });
        Ok(venv?.join("bin/python"))
    })
}

/// The node_modules of node/package-lock.json.
pub(crate) fn node_modules() -> &'static Installed {
    static NODE: OnceLock<Installed> = OnceLock::new();
    NODE.get_or_init(|| {
        if !runs(&["node", "-e", "process.exit(process.versions.node.split('.')[0] >= 18 ? 0 : 1)"])
            || !runs(&["npm", "--version"])
        {
            return Err("there is no Node 18 with npm".into());
        }
        let project = install("node", "package-lock.json", |into| {
            std::fs::create_dir_all(into)?;
            for file in ["package.json", "package-lock.json"] {
                std::fs::copy(directory("node").join(file), into.join(file))?;
            }
            // The packages need no install scripts, and a script may do anything.
            let ci = ["300", "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent"];
            run(Command::new("timeout").args(ci).current_dir(into))
        });
        Ok(project?.join("node_modules"))
    })
}

/// Installs into a directory of its own for each state of the lock file. An unfinished one has no `complete`.
fn install(language: &str, lock: &str, fill: impl FnOnce(&Path) -> anyhow::Result<()>) -> Result<PathBuf, String> {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join("services").join(language);
    let wanted = std::fs::read(directory(language).join(lock)).map_err(|error| error.to_string())?;
    if std::fs::read(place.join("complete")).is_ok_and(|complete| complete == wanted) {
        return Ok(place);
    }
    let installed = (|| {
        if place.exists() {
            std::fs::remove_dir_all(&place)?;
        }
        std::fs::create_dir_all(place.parent().context("it has one")?)?;
        fill(&place)?;
        Ok::<_, anyhow::Error>(std::fs::write(place.join("complete"), wanted)?)
    })();
    installed.map_err(|error| format!("the packages for {language} could not be installed: {error:#}"))?;
    Ok(place)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn runs(command: &[&str]) -> bool {
    Command::new(command[0]).args(&command[1..]).output().is_ok_and(|output| output.status.success())
}
