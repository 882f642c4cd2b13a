// The server's addresses. Every failure is an Error with `message`, `hint` and `status`.

async function answer(response) {
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not from our server: the status alone must do.
  }
  throw Object.assign(new Error(error.message ?? `The server answered ${response.status}.`), {
    hint: error.hint ?? "", status: response.status,
  });
}

async function ask(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw Object.assign(new Error("The server does not answer."), {
      hint: "Check that it is still running, and try again.", status: 0,
    });
  }
  return answer(response);
}

const post = (path, body, type) =>
  ask(path, { method: "POST", body, headers: type ? { "content-type": type } : {} });

export const addPicture = async (file) =>
  (await post("api/pictures", file, file.type || "application/octet-stream")).json();
export const addScene = async (number) => (await post(`api/scenes/${number}`)).json();
export const addJob = async (wish) =>
  (await post("api/jobs", JSON.stringify(wish), "application/json")).json();
export const jobAfter = async (id, version) => (await ask(`api/jobs/${id}?after=${version}`)).json();
export const sourceBlob = async (id) => (await ask(`api/pictures/${id}.png`)).blob();
export const resultBlob = async (id) => (await ask(`api/results/${id}/picture.png`)).blob();
export const runBlob = async (id) => (await ask(`api/results/${id}/run.json`)).blob();
