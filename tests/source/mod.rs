//! The SQL statements of the library, read from its source: with their fragments, as the crate sends them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The comment that gives each statement its name.
const NAME: &str = "/* pg_idempotency: ";

/// A statement that the crate sends.
pub(crate) struct Statement {
    pub(crate) name: String,
    pub(crate) sql: String,
}

/// Every statement with a name in `src/`, in the order of the files and of the lines. One name may have several texts.
pub(crate) fn statements() -> Vec<Statement> {
    let sources: Vec<TokenStream> = rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
        .iter()
        .map(|path| {
            let text = fs::read_to_string(path).expect("a source file");
            text.parse().unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        })
        .collect();
    let mut fragments = Fragments(HashMap::new());
    for source in &sources {
        fragments.define(source.clone());
    }
    let mut found = Vec::new();
    for source in sources {
        fragments.find(source, &mut found);
    }
    found
}

fn rust_files(folder: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        if path.is_dir() {
            found.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// The macros that are a literal, or a `concat!` of literals: their parameters and their bodies.
struct Fragments(HashMap<String, (Vec<String>, TokenStream)>);

impl Fragments {
    /// Remembers every `macro_rules!` of a file.
    fn define(&mut self, source: TokenStream) {
        let tokens: Vec<_> = source.into_iter().collect();
        for window in tokens.windows(4) {
            if let [TokenTree::Ident(word), _, TokenTree::Ident(name), TokenTree::Group(rule)] = window
                && word == "macro_rules"
            {
                let mut groups = rule.stream().into_iter().filter_map(|token| match token {
                    TokenTree::Group(group) => Some(group.stream()),
                    _ => None,
                });
                let (pattern, body) = (groups.next().expect("a pattern"), groups.next().expect("a body"));
                let mut names = pattern.into_iter().filter_map(|token| match token {
                    TokenTree::Ident(name) if name != "literal" => Some(name.to_string()),
                    _ => None,
                });
                self.0.insert(name.to_string(), (names.by_ref().collect(), body));
            }
        }
    }

    /// Collects the statements of the code, but not those of the definitions of macros.
    fn find(&self, code: TokenStream, found: &mut Vec<Statement>) {
        let mut tokens = code.into_iter().peekable();
        let mut name = None;
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(ident) => name = Some(ident.to_string()),
                TokenTree::Punct(mark) if mark.as_char() == '!' => {
                    if name.as_deref() == Some("macro_rules") {
                        // The name and the rule.
                        tokens.next();
                        tokens.next();
                        continue;
                    }
                    let Some(TokenTree::Group(group)) = tokens.peek() else { continue };
                    let text = name.as_deref().and_then(|name| self.expanded(name, group.stream(), &HashMap::new()));
                    if let Some(text) = text {
                        tokens.next();
                        found.extend(named(text));
                    }
                }
                TokenTree::Literal(literal) => {
                    let text = syn::parse_str::<syn::LitStr>(&literal.to_string()).map(|text| text.value());
                    found.extend(text.ok().and_then(named));
                }
                TokenTree::Group(group) => self.find(group.stream(), found),
                TokenTree::Punct(_) => {}
            }
        }
    }

    /// The text of a macro with these arguments. `None` for a macro that does not expand to a text.
    fn expanded(&self, name: &str, arguments: TokenStream, of: &HashMap<String, String>) -> Option<String> {
        if name == "concat" {
            return self.all(arguments, of).map(|parts| parts.concat());
        }
        let (parameters, body) = self.0.get(name)?;
        let arguments = self.all(arguments, of)?;
        if parameters.len() != arguments.len() {
            return None;
        }
        let of = parameters.iter().cloned().zip(arguments).collect();
        self.all(body.clone(), &of).map(|parts| parts.concat())
    }

    /// The texts between the commas.
    fn all(&self, parts: TokenStream, of: &HashMap<String, String>) -> Option<Vec<String>> {
        let mut texts = Vec::new();
        let mut tokens = parts.into_iter();
        let mut last = None;
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Literal(literal) => {
                    texts.push(syn::parse_str::<syn::LitStr>(&literal.to_string()).ok()?.value());
                }
                TokenTree::Ident(name) => {
                    let name = name.to_string();
                    // The name of a parameter follows a dollar, as `crate` does.
                    texts.extend(of.get(&name).cloned());
                    last = Some(name);
                }
                TokenTree::Punct(mark) if mark.as_char() == '!' => {
                    let Some(TokenTree::Group(group)) = tokens.next() else { return None };
                    texts.push(self.expanded(last.as_deref()?, group.stream(), of)?);
                }
                TokenTree::Group(group) if group.delimiter() == Delimiter::None => {
                    texts.extend(self.all(group.stream(), of)?);
                }
                TokenTree::Punct(_) => {}
                TokenTree::Group(_) => return None,
            }
        }
        Some(texts)
    }
}

/// A text with a name is a statement.
fn named(sql: String) -> Option<Statement> {
    let (_, rest) = sql.split_once(NAME)?;
    let (name, _) = rest.split_once(" */")?;
    Some(Statement { name: name.to_owned(), sql })
}
