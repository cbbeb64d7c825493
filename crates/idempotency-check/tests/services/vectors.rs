//! The programs of the guide take the fingerprint of a request as the layer of pg-idempotency does: of the target that
//! the client has sent, and the body.

use serde_json::Value;

use crate::packages::{WITH_FUNCTIONS, guide, in_node, in_python};
use crate::program::{Service, text};

async fn computes_the_vectors(service: Option<Service>) -> anyhow::Result<()> {
    let Some(service) = service else { return Ok(()) };
    let vectors = vectors()?;
    let decoded: Vec<_> =
        vectors.iter().map(|vector| (bytes(&vector["request"]), text(&vector["fingerprint"]))).collect();
    // Those with a payment are whole requests. The fingerprint is also their key.
    let requests: Vec<_> = decoded
        .iter()
        .filter_map(|(request, fingerprint)| {
            let (target, body) = std::str::from_utf8(request).ok()?.strip_prefix("POST ")?.split_once('\n')?;
            body.contains("amount").then(|| (fingerprint.clone(), target, body))
        })
        .collect();
    assert_eq!(requests.len(), 3);
    let service = service.with_directory(&guide()).with_tables(WITH_FUNCTIONS);
    for ((fingerprint, target, _), stored) in requests.iter().zip(service.fingerprints(&requests).await?) {
        assert_eq!(&stored.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), fingerprint, "{target}");
    }
    Ok(())
}

pub(crate) fn vectors() -> serde_json::Result<Vec<Value>> {
    serde_json::from_str(include_str!("../../../../tests/vectors/fingerprints.json"))
}

pub(crate) fn bytes(hex: &Value) -> Vec<u8> {
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap_or_default(), 16).expect("hex");
    text(hex).as_bytes().chunks(2).map(byte).collect()
}

#[tokio::test]
async fn fastapi_takes_the_fingerprint_that_the_layer_takes() -> anyhow::Result<()> {
    computes_the_vectors(in_python("fastapi", "", "payments")?).await
}

#[tokio::test]
async fn node_takes_the_fingerprint_that_the_layer_takes() -> anyhow::Result<()> {
    computes_the_vectors(in_node("node", "payments.js")?).await
}
