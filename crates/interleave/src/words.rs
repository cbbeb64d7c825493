//! The words of traces and ends: the letter of an actor, and the name of an error.

use pg_idempotency::Error;

pub(crate) fn letter(actor: usize) -> char {
    char::from(b'A' + actor as u8)
}

/// The name of an error, as a part of an end.
pub(crate) fn cause(error: &anyhow::Error) -> String {
    match error.downcast_ref::<Error>() {
        Some(Error::Retryable(_)) => "is told to retry".to_owned(),
        Some(error) if !matches!(error, Error::Database(_)) => {
            let name = match error {
                Error::Misuse(mistake) => format!("{mistake:?}"),
                Error::Incompatible(unknown) => format!("{unknown:?}"),
                error => format!("{error:?}"),
            };
            name.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default().to_owned()
        }
        _ => match error.chain().find_map(|cause| cause.downcast_ref::<sqlx::Error>()) {
            Some(sqlx::Error::Database(error)) => format!("fails: {}", error.code().unwrap_or_default()),
            Some(_) => "fails: cut off".to_owned(),
            None => error.to_string(),
        },
    }
}
