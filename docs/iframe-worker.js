// Search in pages that are opened as files, where browsers refuse workers: their script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      document.body.append(frame);
      const send = (target, data) => target.dispatchEvent(new MessageEvent("message", { data }));
      loaded.then(() => { frame.contentWindow.postMessage = (data) => send(this, data); });
      this.postMessage = (data) => loaded.then(() => send(frame.contentWindow, data));
    }
  };
}
// The search excludes words after a hyphen, and so would find nothing for an option such as --resize.
document.addEventListener("input", ({ target }) => {
  if (target.matches(".md-search__input")) target.value = target.value.replace(/(^|\s)-+/g, "$1");
}, true);
